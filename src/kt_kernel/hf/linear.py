"""KTLinear: a linear of a torch model on our kernels, and the replacement of all of them."""

from collections.abc import Collection, Iterator

import torch
from torch import nn

from kt_kernel import _core
from kt_kernel.hf.kept_linears import kept_linears
from kt_kernel.runtime import Runtime

FORMATS = ("bf16", "int8", "int4", "int4g")


def preferred_format(variant: str) -> str | None:
    """What linears should be packed in without losing anything; None: torch keeps them.

    A matrix of 8192 x 2048 in bf16 on 2 cores of Zen 4, torch 2.13 -> ours, with T rows:
        AVX-512 with bf16   T=1: 7.6 -> 1.4 ms, T=4: 7.9 -> 1.8, T=16: 12.8 -> 5.8, T=64: 28 -> 23, T=512: 169 -> 172
        AVX2                T=4: 18 -> 5.7 ms, T=16: 66 -> 17, T=64: 446 -> 72, T=512: 1091 -> 317
    (a shared machine: of each figure the least of a second). Emulated instruction sets are for tests.
    """
    return None if variant.startswith("emu") else "bf16"


class KTLinear(nn.Module):
    """y = x W^T + bias, with W packed for this CPU; the weight is no parameter any more.

    The kernels take bf16: other inputs are rounded to it, and the output, made from f32 sums, has the input's dtype. Of
    up to 32 rows in a call, each gets the bits that it would get alone.
    """

    def __init__(self, linear: _core.Linear, runtime: Runtime):
        super().__init__()
        self.kt_linear = linear
        self.runtime = runtime  # whose pool it runs on
        self.in_features, self.out_features = linear.columns, linear.rows

    @classmethod
    def pack(cls, linear: nn.Linear, weight_format: str, runtime: Runtime) -> "KTLinear":
        if weight_format not in FORMATS:
            raise ValueError(
                f"weight_format {weight_format!r} is unknown; the formats of linears are: {', '.join(FORMATS)}"
            )
        weight, bias = linear.weight.detach(), linear.bias
        if weight.device.type != "cpu":
            raise ValueError(f"a linear on {weight.device} cannot be packed; load the model on the CPU")
        packed = _core.Linear(
            runtime.pool,
            format=weight_format,
            rows=weight.shape[0],
            columns=weight.shape[1],
            bias=bias is not None,
        )
        packed.load(weight.to(torch.bfloat16).contiguous())
        if bias is not None:
            packed.load_bias(bias.detach().to(torch.float32).contiguous())
        return cls(packed, runtime)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            raise RuntimeError("linears that kt-kernel packed have no gradients: use torch.no_grad()")
        if x.shape[-1] != self.in_features:
            raise ValueError(f"the input has {x.shape[-1]} features; this linear takes {self.in_features}")
        rows = x.reshape(-1, self.in_features).to(torch.bfloat16)
        if rows.stride(1) != 1 or (len(rows) > 1 and rows.stride(0) < self.in_features):
            rows = rows.contiguous()
        as_bf16 = x.dtype == torch.bfloat16
        out = torch.empty(len(rows), self.out_features, dtype=torch.bfloat16 if as_bf16 else torch.float32)
        self.kt_linear.forward(
            len(rows),
            rows.data_ptr(),
            rows.stride(0) if len(rows) > 1 else self.in_features,
            out.data_ptr(),
            self.out_features,
            not as_bf16,
        )
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        linear = self.kt_linear
        return f"in_features={linear.columns}, out_features={linear.rows}, bias={linear.bias}, format={linear.format}"


def linears_of(model: nn.Module, skip: Collection[str] = ()) -> Iterator[tuple[str, nn.Module, str]]:
    """Each plain nn.Linear, as its name, the module that holds it and its name there.

    Classes derived from nn.Linear compute something else; routers, and what the model's code reads itself, stay; `skip`
    holds last or whole names of others to leave alone.
    """
    skip = {*skip, *kept_linears(model)}
    for prefix, parent in model.named_modules():
        for child_name, child in parent._modules.items():  # named_children leaves repetitions out
            name = f"{prefix}.{child_name}" if prefix else child_name
            if type(child) is nn.Linear and name not in skip and child_name not in skip:
                yield name, parent, child_name


def replace_linears(model: nn.Module, weight_format: str, runtime: Runtime, skip: Collection[str] = ()) -> int:
    """Packs every linear of the model, one after the other, each freed before the next; returns how many.

    A head that is tied to the embedding becomes a packed copy, and the embedding stays.
    """
    # Keyed by the object, which stays until the end without what it held: a module may be in several places.
    replaced: dict[nn.Module, KTLinear] = {}
    for name, parent, child_name in list(linears_of(model, skip)):
        linear = getattr(parent, child_name)
        if linear not in replaced:
            if linear.weight.is_meta:
                raise ValueError(f"{name} has no weights yet (it is on the meta device); load the model first")
            replaced[linear] = KTLinear.pack(linear, weight_format, runtime)
            linear._parameters.clear()
        setattr(parent, child_name, replaced[linear])
    return len(replaced)

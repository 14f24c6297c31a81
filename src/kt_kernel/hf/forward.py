"""out[t] = sum_j weights[t, j] * expert_index[t, j](x[t]): the experts function "kt", on our layers.

Tokens on the CPU go to the layer by address (2 us a call). Tokens on a GPU go by its stream; experts that live on the
GPU are computed there meanwhile, and both results are added.
"""

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from kt_kernel import KTMoEWrapper, _core, expert_counts
from kt_kernel.hf.activations import Activation

STOCK = "grouped_mm"  # computes what stays with transformers


def kt_experts_forward(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    layer = vars(self).get("kt_layer")
    if layer is None:
        return ALL_EXPERTS_FUNCTIONS[STOCK](self, hidden_states, top_k_index, top_k_weights)
    return layer(hidden_states, top_k_index, top_k_weights)


class KTLayer:
    """The experts of one module."""

    def __init__(self, wrapper: KTMoEWrapper, on_gpu: "GpuExperts | None" = None):
        self.wrapper, self.on_gpu = wrapper, on_gpu
        self._layer: _core.MoELayer = wrapper.moe
        self._top_k, self._hidden = wrapper.num_experts_per_tok, wrapper.hidden_size
        self._counter = expert_counts.counter()

    def __call__(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if index.shape[-1] != self._top_k or weights.shape != index.shape:
            raise ValueError(
                f"layer {self.wrapper.layer_idx} was loaded for {self._top_k} experts per token, and the router chose "
                f"{index.shape[-1]}, with {weights.shape[-1]} weights: set it in the config before from_pretrained"
            )
        if self._counter is not None:
            self._counter.add(self.wrapper.layer_idx, index, self.wrapper.num_experts)
        if x.requires_grad and torch.is_grad_enabled():
            with torch.no_grad():
                out = self(x, index, weights)
            return _NoGradient.apply(x, out)
        if x.is_cuda:
            return self._on_cuda(x, index, weights)
        if not x.is_cpu or x.numel() * self._top_k != index.numel() * self._hidden:
            raise ValueError(
                f"layer {self.wrapper.layer_idx} got hidden states {list(x.shape)} on {x.device} for "
                f"{index.numel() // self._top_k} tokens; needed is [tokens, {self._hidden}] on the CPU or a CUDA device"
            )
        return self._on_cpu(x, index, weights)

    def _on_cpu(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens = (x if x.dtype is torch.bfloat16 else x.to(torch.bfloat16)).contiguous()
        ids = (index if index.dtype is torch.int64 else index.long()).contiguous()
        shares = (weights if weights.dtype is torch.float32 else weights.float()).contiguous()
        out = torch.empty_like(tokens)
        self._layer.forward(
            ids.shape[0], ids.data_ptr(), shares.data_ptr(), tokens.data_ptr(), out.data_ptr(), id_bytes=8
        )
        if x.dtype is not torch.bfloat16:
            out = out.to(x.dtype)
        return out if self.on_gpu is None else out + self.on_gpu(x, index, weights)

    def _on_cuda(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.wrapper.submit_forward(x, index, weights)
        theirs = None if self.on_gpu is None else self.on_gpu(x, index, weights)
        ours = self.wrapper.sync_forward(x).view(x.shape)
        return ours if theirs is None else ours + theirs


class _NoGradient(torch.autograd.Function):
    """Packed experts cannot be trained: a backward pass says so instead of leaving them out."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            "experts that kt-kernel packed have no gradients; train a copy of the model without KTConfig"
        )


class GpuExperts(nn.Module):
    """Some experts of a module as tensors, which transformers computes wherever they are.

    `mask` names them among all; gate, up and down are theirs, [n, I, H], [n, I, H] and [n, H, I], and so are biases.
    """

    has_post_expert_norm = False
    is_transposed = False
    _is_expert_parallel = True  # ids of the other experts are n, which is skipped

    def __init__(
        self,
        module: nn.Module,
        activation: Activation,
        mask: list[bool],
        matrices: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor],
        biases: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor] | None,
    ):
        super().__init__()
        self.num_experts = sum(mask)
        self.has_gate, self.has_bias = module.has_gate, biases is not None
        self.is_concatenated = module.is_concatenated
        self.act_fn = getattr(module, "act_fn", None)
        self._apply_gate = module._apply_gate
        # Buffers that are not saved: they move with the model, and are no parameters.
        first = "gate_up_proj" if module.has_gate else "up_proj"
        for suffix, (gate, up, down) in (("", matrices), *([("_bias", biases)] if biases else [])):
            both = up if gate is None else _join(gate, up, activation.alternating)
            self.register_buffer(first + suffix, both, persistent=False)
            self.register_buffer("down_proj" + suffix, down, persistent=False)
        ids = torch.full((len(mask) + 1,), self.num_experts)
        ids[:-1][torch.tensor(mask)] = torch.arange(self.num_experts)
        self.register_buffer("ids", ids.to(down.device), persistent=False)

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return ALL_EXPERTS_FUNCTIONS[STOCK](self, x, self.ids[index.long()], weights.to(x.dtype))


def _join(gate: torch.Tensor, up: torch.Tensor, alternating: bool) -> torch.Tensor:
    return torch.stack([gate, up], dim=2).flatten(1, 2) if alternating else torch.cat([gate, up], dim=1)

"""One layer of a model: some of its experts, loaded as the engine loads them, against torch in f32.

What must hold: the kernels compute the weights as packed (fp64, element by element), and the output is as near to that
of the checkpoint's own weights as the format allows.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import kt_kernel
from kt_kernel.verify.kernels import limit_share
from kt_kernel.verify.limits import act_kind, layer_limit
from kt_kernel.verify.random_experts import by_package
from kt_kernel.verify.reference import ACT_ERROR, Activation, Biases, Weights, moe_with_bound, relative_error
from kt_kernel.weights import choose_traits, find_method, model_config
from kt_kernel.weights.checkpoint import CheckpointExperts
from kt_kernel.weights.detect import locate
from kt_kernel.weights.experts import Experts, Sizes
from kt_kernel.weights.floats import to_bf16, to_f32
from kt_kernel.weights.gguf_experts import GgufExperts
from kt_kernel.weights.loading import open_experts

if TYPE_CHECKING:
    import torch

    from kt_kernel.wrapper import KTMoEWrapper

_TOKENS = (1, 9, 40)
_MOST_EXPERTS = 8
_SAMPLE_BYTES = 1 << 29  # of experts in f32; at the peak there are three copies


@dataclass(frozen=True)
class Originals:
    """Weights of a checkpoint in f32, by expert, and where they are from."""

    experts: dict[int, Weights]
    source: str


def check_layer(path: Path, layer_idx: int | None = None, method: str = "auto", threads: int | None = None) -> dict:
    """What was found, in plain values. OSError or ValueError where the model cannot be read."""
    from kt_kernel.wrapper import KTMoEWrapper

    config = model_config(path)
    if layer_idx is None:
        layer_idx = config.moe_layers[len(config.moe_layers) // 2]
    elif layer_idx not in config.moe_layers:
        first, last = config.moe_layers[0], config.moe_layers[-1]
        raise ValueError(f"layer {layer_idx} of {path} has no experts; layers that do are {first} to {last}")
    hidden, intermediate = config.hidden_size, config.moe_intermediate_size
    if method == "auto":
        method = find_method(path, layer_idx, hidden, intermediate)
    chosen = _sample(config.num_experts, hidden, intermediate)
    # The others count as on the GPU: they take no memory here.
    elsewhere = [expert not in chosen for expert in range(config.num_experts)]
    wrapper = KTMoEWrapper(
        layer_idx=layer_idx,
        num_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        hidden_size=hidden,
        moe_intermediate_size=intermediate,
        gpu_experts_mask=elsewhere,
        skip_gpu_experts=True,
        cpuinfer_threads=threads,
        weight_path=path,
        method=method,
    )
    wrapper.load_weights(progress=lambda done, total: None)
    traits = choose_traits(str(path), layer_idx, None, None, 0.0, 0.0, method)
    activation = Activation(traits.swiglu_limit, traits.swiglu_alpha, traits.activation)
    kind, source = locate(path, layer_idx, method)
    with open_experts(kind, source, layer_idx, wrapper.moe.format, Sizes.of(wrapper.moe)) as experts:
        originals = _originals(experts, chosen)
        biases = {expert: tuple(experts.bias_vectors(expert)) for expert in chosen} if experts.biases else None
    found = _compare(wrapper, chosen, originals, activation, biases)
    return {"layer": layer_idx, "method": method, "format": wrapper.moe.format, "experts": chosen, **found}


def _sample(count: int, hidden: int, intermediate: int) -> list[int]:
    """Experts, evenly over all, so that first and last are among them."""
    most = max(1, min(count, _MOST_EXPERTS, _SAMPLE_BYTES // (3 * hidden * intermediate * 4)))
    return sorted({round(i * (count - 1) / max(1, most - 1)) for i in range(most)})


def _originals(experts: Experts, chosen: list[int]) -> Originals | None:
    """None where there is nothing but what the layer has: converted files, or GGUF without its package."""
    if isinstance(experts, CheckpointExperts):
        found = {expert: tuple(map(_f32, experts.matrices(expert))) for expert in chosen}
        return Originals(found, "the checkpoint's weights")
    if isinstance(experts, GgufExperts):
        kinds = experts.format.split("/") if "/" in experts.format else [experts.format] * 3
        found = {expert: by_package(kinds, experts.arrays(expert)) for expert in chosen}
        return Originals(found, "the package gguf") if None not in found.values() else None
    return None


def _f32(matrix: object) -> np.ndarray:
    return to_f32(np.ascontiguousarray(matrix))


def _compare(
    wrapper: "KTMoEWrapper",
    chosen: list[int],
    originals: Originals | None,
    activation: Activation,
    biases: dict[int, Biases] | None,
) -> dict:
    import torch

    variant = kt_kernel.__cpu_variant__
    packed = {expert: wrapper.moe.decode_expert(expert) for expert in chosen}
    act_error = max(ACT_ERROR[act_kind(part, variant)] for part in wrapper.moe.format.split("/"))
    limit = layer_limit(wrapper.moe.format, variant)
    share, error, failures = 0.0, None, []
    for tokens in _TOKENS:
        bits, ids, weights = _batch(wrapper, chosen, tokens)
        x = torch.from_numpy(bits).view(torch.bfloat16)
        out = wrapper.forward(x, torch.from_numpy(ids), torch.from_numpy(weights)).double().numpy()
        if not np.isfinite(out).all():
            failures.append(f"T={tokens}: an output is not a finite number")
            continue
        exact, bound = moe_with_bound(
            packed, to_f32(bits), ids, weights, act_error=act_error, activation=activation, biases=biases
        )
        share = max(share, found := limit_share(out, exact, bound))
        if not found <= 1:
            failures.append(f"T={tokens}: an output is {found:.2g} times as far off as a right kernel may be")
        if originals is not None:
            by_torch = torch_moe(originals.experts, x.float(), ids, weights, activation, biases)
            error = max(error or 0.0, found := relative_error(out, by_torch.double().numpy()))
            if not found <= limit:
                failures.append(f"T={tokens}: {found:.2g} off {originals.source} by torch; the limit is {limit:.2g}")
    return {
        "limit_share": share,
        "relative_error": error,
        "limit": limit,
        "source": originals.source if originals else None,
        "tokens": list(_TOKENS),
        "failures": failures,
    }


def _batch(wrapper: "KTMoEWrapper", chosen: list[int], tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """bf16 bits of x, ids of the chosen experts (-1 for what they are too few for), and weights."""
    rng = np.random.default_rng([tokens, 11])
    top_k = wrapper.num_experts_per_tok
    x = to_bf16(rng.standard_normal((tokens, wrapper.hidden_size), np.float32), "x")
    ids = np.full((tokens, top_k), -1, np.int64)
    used = min(top_k, len(chosen))
    ids[:, :used] = rng.permuted(np.tile(chosen, (tokens, 1)), axis=1)[:, :used]
    return x, ids, rng.random((tokens, top_k), np.float32)


def torch_moe(
    experts: dict[int, Weights],
    x: "torch.Tensor",
    ids: np.ndarray,
    weights: np.ndarray,
    activation: Activation,
    biases: dict[int, Biases] | None,
) -> "torch.Tensor":
    """f32 [T, H]."""
    import torch
    from torch.nn.functional import linear

    out = torch.zeros_like(x)
    for expert, matrices in experts.items():
        tokens, slots = np.nonzero(ids == expert)
        gate, up, down = (torch.from_numpy(np.ascontiguousarray(matrix, np.float32)) for matrix in matrices)
        added = [torch.from_numpy(np.array(bias, np.float32)) for bias in biases[expert]] if biases else [None] * 3
        rows = x[tokens]
        h = _activate(linear(rows, gate, added[0]), linear(rows, up, added[1]), activation)
        out.index_add_(
            0,
            torch.from_numpy(tokens),
            linear(h, down, added[2]) * torch.from_numpy(weights[tokens, slots])[:, None],
        )
    return out


def _activate(g: "torch.Tensor", u: "torch.Tensor", activation: Activation) -> "torch.Tensor":
    from torch.nn.functional import gelu, silu

    if activation.limit:
        both_sides = activation.alpha and activation.name != "swigluoai"
        g = g.clamp(min=-activation.limit if both_sides else None, max=activation.limit)
        u = u.clamp(-activation.limit, activation.limit)
    if activation.name == "gelu_tanh":
        return gelu(g, approximate="tanh") * u
    if activation.alpha:
        return g * (activation.alpha * g).sigmoid() * (u + 1)
    return silu(g) * u

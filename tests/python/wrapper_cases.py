"""Wrappers with random experts, and what they should give: shared by the tests of KTMoEWrapper."""

import numpy as np
import pytest
from layer_limits import LIMITS, Limit, act_kind
from layer_reference import ACT_ERROR, SILU, Activation, Shape, moe_with_bound, random_batch, random_expert

import kt_kernel
from kt_kernel import KTMoEWrapper
from kt_kernel.methods import GROUP_SIZES
from kt_kernel.methods import METHODS as FORMATS

torch = pytest.importorskip("torch", reason="torch is not installed: KTMoEWrapper was not tested")

METHODS = [method for method in FORMATS if method not in GROUP_SIZES]  # that take tensors
SHAPE = Shape(experts=6, top_k=3, hidden=144, intermediate=200)
CHUNK = 48  # tokens


def sizes(shape: Shape) -> dict[str, int]:
    return {
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "hidden_size": shape.hidden,
        "moe_intermediate_size": shape.intermediate,
    }


def make(shape: Shape = SHAPE, method: str = "BF16", **options) -> KTMoEWrapper:
    """Two threads in one sub-pool, so that all of these share a pool."""
    given = {"layer_idx": 0, "cpuinfer_threads": 2, "threadpool_count": 1, "chunked_prefill_size": CHUNK, **options}
    return KTMoEWrapper(method=method, **sizes(shape), **given)


def tensor_of_bits(bits: np.ndarray) -> "torch.Tensor":
    return torch.from_numpy(np.ascontiguousarray(bits).view(np.int16)).view(torch.bfloat16)


def tensors(shape: Shape = SHAPE, seed: int = 0) -> "list[torch.Tensor]":
    """bf16 gate, up and down of all experts."""
    experts = [random_expert(shape, seed, expert) for expert in range(shape.experts)]
    return [tensor_of_bits(np.stack(matrices)) for matrices in zip(*experts, strict=True)]


def loaded(shape: Shape = SHAPE, method: str = "BF16", seed: int = 0, **options) -> KTMoEWrapper:
    wrapper = make(shape, method, **options)
    wrapper.load_weights_from_tensors(*tensors(shape, seed))
    return wrapper


def batch(shape: Shape = SHAPE, tokens: int = 9, seed: int = 0) -> "list[torch.Tensor]":
    """bf16 hidden states, int64 ids, f32 weights."""
    x, ids, weights = random_batch(shape, tokens, seed)
    return [tensor_of_bits(x), torch.from_numpy(ids), torch.from_numpy(weights)]


def limit_of(method: str) -> Limit:
    weight_format = FORMATS[method]
    return LIMITS[weight_format, act_kind(weight_format, kt_kernel.__cpu_variant__)]


def reference(wrapper: KTMoEWrapper, x, ids, weights, mask=None, activation: Activation = SILU, biases=None):
    """fp64 [q, H] from the weights as packed, and how far each element may be from it."""
    experts = [wrapper.moe.decode_expert(expert) for expert in range(wrapper.num_experts)]
    act_error = ACT_ERROR[act_kind(wrapper.moe.format, kt_kernel.__cpu_variant__)]
    skipped = (wrapper.gpu_experts_mask if mask is None else mask).tolist()
    inputs = [part.detach().double().numpy() for part in (x.reshape(-1, wrapper.hidden_size).bfloat16(), weights)]
    return moe_with_bound(experts, inputs[0], ids.numpy(), inputs[1], skipped, act_error, activation, biases)


def assert_right(wrapper: KTMoEWrapper, out, x, ids, weights, **options) -> None:
    exact, bound = reference(wrapper, x, ids, weights, **options)
    assert out.shape == exact.shape
    errors = np.abs(out.double().numpy() - exact)
    assert (errors <= bound).all(), f"error {errors.max()} where {bound.flat[errors.argmax()]} is the limit"


def same_bits(left: "torch.Tensor", right: "torch.Tensor") -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)

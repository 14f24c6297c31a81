"""A small MoE layer in two halves: hot experts on the GPU in torch, cold ones on the CPU through the wrapper."""

import torch

from kt_kernel import KTMoEWrapper

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 16, 4, 256, 320
# Relative error of the whole layer against float32 with the weights as they were given. The worst of 400 single tokens
# was 0.030, 0.304 and 0.209 with integers.
LIMITS = {"BF16": 0.01, "AMXINT8": 0.035, "AMXINT4": 0.32, "INT4G": 0.23}


def make_weights(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, depth: int) -> torch.Tensor:
        return (torch.randn(EXPERTS, rows, depth, generator=generator) / depth**0.5).bfloat16()

    return normal(INTERMEDIATE, HIDDEN), normal(INTERMEDIATE, HIDDEN), normal(HIDDEN, INTERMEDIATE)


def make_wrapper(weights, method="BF16", mask=None, layer_idx=0, path="", **options) -> KTMoEWrapper:
    wrapper = KTMoEWrapper(
        layer_idx=layer_idx,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        gpu_experts_mask=mask,
        cpuinfer_threads=4,
        threadpool_count=1,
        weight_path=path,
        chunked_prefill_size=8192,
        method=method,
        **options,
    )
    wrapper.load_weights_from_tensors(*weights, torch.arange(EXPERTS))
    return wrapper


def make_tokens(count: int, seed: int = 1):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(count, HIDDEN, device="cuda", generator=generator).bfloat16()
    ids = torch.rand(count, EXPERTS, device="cuda", generator=generator).argsort(-1)[:, :TOP_K].contiguous()
    return x, ids, torch.rand(count, TOP_K, device="cuda", generator=generator)


class GpuExperts:
    """All experts in float32 on the GPU; computes those that ``chosen`` names."""

    def __init__(self, weights):
        self._gate, self._up, self._down = (w.cuda().float() for w in weights)

    def __call__(self, x, ids, weights, chosen=None) -> torch.Tensor:
        """Without a loop over tokens, and without a look at ids on the host: it can be captured."""
        hidden = torch.nn.functional.silu(torch.einsum("th,eih->tei", x.float(), self._gate))
        hidden = hidden * torch.einsum("th,eih->tei", x.float(), self._up)
        outputs = torch.einsum("tei,ehi->teh", hidden, self._down)
        share = torch.zeros(x.shape[0], EXPERTS, device=x.device)
        valid = (ids >= 0) & (ids < EXPERTS)
        share.scatter_add_(1, torch.where(valid, ids, 0).long(), torch.where(valid, weights.float(), 0.0))
        if chosen is not None:
            share = share * chosen
        return torch.einsum("te,teh->th", share, outputs)


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return ((result.float() - expected).norm() / expected.norm()).item()

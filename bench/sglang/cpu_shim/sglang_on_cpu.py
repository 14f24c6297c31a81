"""A plugin of SGLang for machines without a GPU: what its files for experts take from CUDA, and experts in torch.

SGLang loads it in every process that it starts. Beside a GPU it does nothing. The experts that SGLang itself computes
("on the GPU") go through `moe_forward_native`, which cannot skip an id of -1: the mark of an expert left to kt_kernel.
"""

import torch


class _Stream:
    cuda_stream = 0

    def __init__(self, *_, **__):
        pass


def install() -> None:
    if torch.cuda.is_available():
        return
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_stream = _Stream
    for name in ("empty_cache", "is_current_stream_capturing"):  # of SGLang's recorder of expert distributions
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, lambda: False)

    import sglang.srt.layers.moe.fused_moe_native as native

    native.moe_forward_native = _experts


def _experts(layer, x: torch.Tensor, topk_output, *_) -> torch.Tensor:
    """sum over experts e of weight * down_e (silu(gate_e x) * up_e x), in float32."""
    weights, ids = topk_output.topk_weights, topk_output.topk_ids
    out = torch.zeros(x.shape)
    for expert, (gate_up, down) in enumerate(zip(layer.w13_weight, layer.w2_weight, strict=True)):
        tokens, places = torch.nonzero(ids == expert, as_tuple=True)
        gate, up = (x[tokens].float() @ gate_up.float().T).chunk(2, dim=-1)
        result = (torch.nn.functional.silu(gate) * up) @ down.float().T
        out.index_add_(0, tokens, result * weights[tokens, places].float()[:, None])
    return out.to(x.dtype)

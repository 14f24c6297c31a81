"""The tensors of a call, checked and made into addresses."""

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass
class Tokens:
    count: int
    hidden: "torch.Tensor"  # [..., H]
    ids: "torch.Tensor"  # int32 or int64 [count, K]
    weights: "torch.Tensor"  # [count, K]

    @property
    def on_gpu(self) -> bool:
        return self.hidden.is_cuda

    def addresses(self) -> tuple[int, int, int, int, int]:
        """Arguments of Port.submit, of contiguous bf16, ids and f32. What had to be converted lives as long as this."""
        import torch

        self.hidden = self.hidden.to(torch.bfloat16).contiguous()
        self.ids = self.ids.contiguous()
        self.weights = self.weights.to(torch.float32).contiguous()
        return (
            self.count,
            self.hidden.data_ptr(),
            self.ids.data_ptr(),
            self.weights.data_ptr(),
            self.ids.element_size(),
        )


def stream_context(device: "torch.device", stream: int) -> "contextlib.AbstractContextManager[object]":
    """torch's work inside goes to this stream of this device: conversions, and the memory of results."""
    import torch

    if device.type != "cuda":
        return contextlib.nullcontext()
    if torch.cuda.current_stream(device).cuda_stream == stream and torch.cuda.current_device() == device.index:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device))


def empty_output(device: "torch.device", count: int, hidden_size: int) -> "torch.Tensor":
    import torch

    return torch.empty((count, hidden_size), dtype=torch.bfloat16, device=device)


def as_tokens(
    hidden_states: "torch.Tensor", topk_ids: "torch.Tensor", topk_weights: "torch.Tensor", hidden_size: int, top_k: int
) -> Tokens:
    """Raises TypeError or ValueError that names the argument, what it is, and what it must be."""
    import torch

    for name, tensor in (("hidden_states", hidden_states), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; pass a torch.Tensor")
        if tensor.device != hidden_states.device:
            raise ValueError(f"{name} is on {tensor.device}, hidden_states on {hidden_states.device}; use one device")
    if hidden_states.device.type not in ("cpu", "cuda"):
        raise ValueError(f"hidden_states is on {hidden_states.device}; pass CPU or CUDA tensors")
    if not hidden_states.is_floating_point():
        raise TypeError(f"hidden_states is {_name(hidden_states)}; pass bfloat16, float16 or float32")
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_ids is {_name(topk_ids)}; pass int32 or int64")
    if not topk_weights.is_floating_point():
        raise TypeError(f"topk_weights is {_name(topk_weights)}; pass float32")
    if hidden_states.dim() < 1 or hidden_states.shape[-1] != hidden_size:
        raise ValueError(
            f"hidden_states has shape {list(hidden_states.shape)}; its last dimension must be {hidden_size} "
            "(hidden_size)"
        )
    count = hidden_states.numel() // hidden_size
    for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if tuple(tensor.shape) != (count, top_k):
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}; for {count} tokens it must be [{count}, {top_k}] "
                "(num_experts_per_tok)"
            )
    return Tokens(count, hidden_states, topk_ids, topk_weights)


def stream_handle(cuda_stream: object, device: "torch.device") -> int:
    """The integer of a stream: an int, a torch.cuda.Stream, or None for torch's current one."""
    if cuda_stream is None:
        import torch

        return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    handle = getattr(cuda_stream, "cuda_stream", cuda_stream)
    if isinstance(handle, bool) or not isinstance(handle, int) or handle < 0:
        raise TypeError(f"cuda_stream is {cuda_stream!r}; pass an integer handle, a torch.cuda.Stream, or None")
    return handle


def _name(tensor: "torch.Tensor") -> str:
    return str(tensor.dtype).removeprefix("torch.")

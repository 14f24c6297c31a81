"""Long prompts: the CPU sends all experts of a layer to the GPU, which then computes the layer alone.

One layer's weights have a place on the GPU, for all E experts, made as SGLang makes its own. For each layer:

| Who | What |
|---|---|
| copy stream | waits until the layer before is computed; copies the experts that are on the GPU anyway |
| CPU | writes one expert after the other into the host ring, for every rank |
| copy stream | copies them behind each other, as far as they are written |
| main stream | waits for the copies, computes |

The host runs ahead of the GPU: while a layer is computed, the CPU already writes experts of the next one, the first of
them before the host has come to that layer.

Where SGLang lays weights out otherwise than checkpoints do (Marlin), its own function does that here too, for CHUNK
experts at a time; whether it does is tried out on random bytes.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from kt_kernel import KTMoEWrapper, _core
from kt_kernel.integrations.sglang import engine
from kt_kernel.integrations.sglang.host_ring import PARTS, HostRing

DEPTH = 8  # experts in the ring: four wait to be written while four are copied
CHUNK = 16  # experts that are laid out together

# What SGLang calls the four parts, first found first.
PART_NAMES = (
    ("w13_weight_packed", "w13_weight"),
    ("w13_weight_scale_inv", "w13_weight_scale"),
    ("w2_weight_packed", "w2_weight"),
    ("w2_weight_scale_inv", "w2_weight_scale"),
)
# Parameters that hold numbers which the CPU does not send.
_NOT_SENT = ("bias", "zero_point", "input_scale", "weight_scale_2")


class CannotStreamError(Exception):
    """Why long prompts cannot be computed on the GPU alone; SGLang goes on without."""


def make_prefill(
    method: Any, as_loaded: torch.nn.Module, device: torch.device, threshold: int, dynamic: bool
) -> "tuple[LayerwisePrefill | None, str]":
    """On every rank together; else why it cannot be, which is the same on all of them.

    `as_loaded`: the layer without parameters, before SGLang laid them out for the GPU.
    """
    rank, ranks = engine.tensor_group()
    reason, sizes, weights = "", None, None
    try:
        sizes = _slice_sizes(method, ranks)
        weights = GpuLayer(method, as_loaded, device)
    except (CannotStreamError, NotImplementedError, ValueError, RuntimeError) as error:
        reason = str(error)
    told = [(reason, sizes)] if ranks == 1 else engine.gather_objects((reason, sizes))
    sizes = told[0][1]
    if not (reason := next((why for why, _ in told if why), "")):
        reason = _of_any_rank(weights.misfit(sizes[rank]), ranks)
    if reason:
        return None, reason
    ring = None
    try:
        ring = HostRing(sizes, rank, DEPTH, device, None if ranks == 1 else engine.gather_objects)
    except (RuntimeError, OSError) as error:
        reason = str(error)
    if reason := _of_any_rank(reason, ranks):
        return None, reason
    return LayerwisePrefill(weights, ring, threshold, dynamic), ""


def _of_any_rank(reason: str, ranks: int) -> str:
    return reason if ranks == 1 else next(filter(None, engine.gather_objects(reason)), "")


def _slice_sizes(method: Any, ranks: int) -> list[tuple[int, ...]] | None:
    """Bytes of the parts of an expert, for each rank; on the rank that has them."""
    if method.wrapper is None:
        return None
    moe = method.wrapper.moe
    if not _core.has_slices(moe.format):
        raise CannotStreamError(f"--kt-method {method.wrapper.method} keeps experts in {moe.format}, not as a GPU does")
    return moe.slice_bytes(ranks)


class GpuLayer:
    """Room for all experts of a layer on the GPU, and SGLang's method that computes it."""

    def __init__(self, method: Any, layer: torch.nn.Module, device: torch.device):
        self._arguments = method.weight_arguments
        self.num_experts = method.residents.num_experts
        self.device = device
        self.layer, self.gpu_method = self._build(method, layer, self.num_experts)
        self.parts = [_find(self.layer, names) for names in PART_NAMES]
        if self.parts[0] is None or self.parts[2] is None:
            raise CannotStreamError(f"{type(self.gpu_method).__name__} has no weights of the names that are known")
        refused = [n for n, p in self.layer.named_parameters() if p.numel() and any(word in n for word in _NOT_SENT)]
        if refused:
            raise CannotStreamError(f"the GPU's experts have {', '.join(refused)}, which the CPU does not send")
        if getattr(self.gpu_method, "load_up_proj_weight_first", False) or getattr(
            layer, "use_flashinfer_trtllm_moe", False
        ):
            raise CannotStreamError("this --moe-runner-backend has up before gate; choose triton")
        transposed = bool(getattr(layer, "use_triton_kernels", False))
        self.transposed = [
            name is not None and (transposed or bool(getattr(getattr(self.layer, name), "is_transposed", False)))
            for name in self.parts
        ]
        # A smaller one, as weights are loaded into it, and whether that is how they stay.
        count = min(CHUNK, self.num_experts)
        self._loading, self._loading_method = self._build(method, layer, count)
        self.laid_out = self._is_laid_out_otherwise()
        self.gpu_method.process_weights_after_loading(self.layer)
        self.names = [
            name
            for name, value in self.layer.named_parameters()
            if value.dim() and value.shape[0] == self.num_experts and value.numel()
        ]

    @property
    def bytes(self) -> int:
        return sum(value.numel() * value.element_size() for value in self.layer.parameters())

    def misfit(self, part_bytes: tuple[int, ...]) -> str:
        """Why an expert of the CPU does not fit into one of the GPU, or nothing."""
        for name, size in zip(self.parts, part_bytes, strict=True):
            param = None if name is None else getattr(self._loading, name)
            have = 0 if param is None else param[0].numel() * param.element_size()
            if have != size:
                what = name or "no scales"
                return f"{what} has {have} bytes for an expert on the GPU, and --kt-method sends {size}"
        return ""

    def start_chunk(self) -> torch.nn.Module:
        """Empty parameters for some experts, as they are loaded."""
        chunk = bare_copy(self._loading)
        for name, value in self._loading.named_parameters():
            empty = torch.nn.Parameter(torch.empty_like(value), requires_grad=False)
            chunk.register_parameter(name, empty)
        return chunk

    def finish_chunk(self, chunk: torch.nn.Module, experts: list[int]) -> None:
        """Lays the first experts of a chunk out as the GPU computes them."""
        self._loading_method.process_weights_after_loading(chunk)
        ids = torch.tensor(experts, dtype=torch.int64, device="cpu").to(self.device, non_blocking=True)
        for name in self.names:
            rows(getattr(self.layer, name)).index_copy_(0, ids, rows(getattr(chunk, name))[: len(experts)])

    def _is_laid_out_otherwise(self) -> bool:
        chunk = self.start_chunk()
        for _, value in chunk.named_parameters():
            flat(value).copy_(torch.randint(0, 256, flat(value).shape, dtype=torch.uint8, device=self.device))
        before = {name: (value.shape, value.dtype, flat(value).clone()) for name, value in chunk.named_parameters()}
        self._loading_method.process_weights_after_loading(chunk)
        for name in filter(None, self.parts):
            after = getattr(chunk, name)
            shape, dtype, content = before[name]
            if (after.shape, after.dtype) != (shape, dtype) or not torch.equal(flat(after), content):
                return True
        return any(self.transposed)

    def _build(self, method: Any, layer: torch.nn.Module, count: int) -> tuple[torch.nn.Module, Any]:
        made = bare_copy(layer)
        made.moe_runner_config = dataclasses.replace(method.moe_runner_config, num_local_experts=count)
        if getattr(made.moe_runner_config, "layer", None) is not None:
            made.moe_runner_config.layer = made
        made.num_local_experts = count
        gpu_method = method.another_gpu_method(made)
        made.quant_method = gpu_method
        with self.device:
            gpu_method.create_weights(layer=made, num_experts=count, **self._arguments)
        gpu_method.create_moe_runner(made, made.moe_runner_config)
        return made, gpu_method


class LayerwisePrefill:
    def __init__(self, weights: GpuLayer, ring: HostRing, threshold: int, dynamic: bool):
        self.weights, self.threshold, self.dynamic = weights, threshold, dynamic
        self._ring = ring
        self._queue = CudaQueue(weights.device) if weights.device.type == "cuda" else HostQueue()

    def takes(self, tokens: int) -> bool:
        return tokens >= self.threshold and not self._queue.is_capturing()

    def apply(self, method: Any, layer: torch.nn.Module, dispatch_output: Any) -> Any:
        with self._queue.copying():
            self._load(method, layer)
        self._queue.wait_for_copies()
        combined = self.weights.gpu_method.apply(self.weights.layer, dispatch_output)
        if self.dynamic and 0 < method.residents.count < method.residents.num_experts:
            self._keep_most_used(method, layer, dispatch_output.topk_output.topk_ids)
        self._queue.computed()
        follower = method.plan.streamed_after(method)
        if follower is not None:
            self._ring.begin(follower, follower.residents.others(), self._writer(follower.wrapper))
        return combined

    def _load(self, method: Any, layer: torch.nn.Module) -> None:
        if method.residents.count:
            for name in self.weights.names:
                here = rows(getattr(layer, name))
                rows(getattr(self.weights.layer, name)).index_copy_(0, method.residents.device_ids, here)
        copies = _ChunkCopies(self) if self.weights.laid_out else _PlainCopies(self)
        wrapper = method.wrapper
        wait_written = None if wrapper is None else wrapper.sync_write_weight_scale_to_buffer
        self._ring.stream(method, method.residents.others(), self._writer(wrapper), wait_written, copies)
        copies.finish()

    def _writer(self, wrapper: KTMoEWrapper | None) -> Callable[[int, int], None] | None:
        if wrapper is None:
            return None

        def write(expert: int, slot: int) -> None:
            addresses = [self._ring.addresses(slot, part) for part in range(PARTS)]
            wrapper.submit_write_weight_scale_to_buffer(self._ring.ranks, expert, *addresses)

        return write

    def place(self, layer: torch.nn.Module, place: int, slot: int) -> None:
        """Copies the parts of a slot into place `place` of a layer's parameters."""
        for part, name in enumerate(self.weights.parts):
            if name is None:
                continue
            to, source = getattr(layer, name).data[place], self._ring.part(slot, part)
            if self.weights.transposed[part]:
                sent = source.to(to.device, non_blocking=True)
                to.copy_(sent.view(to.dtype).view(to.shape[::-1]).t())
            else:
                flat(to).copy_(source, non_blocking=True)

    def sent(self) -> Callable[[], None]:
        """What waits for the copies so far."""
        return self._queue.mark()

    def _keep_most_used(self, method: Any, layer: torch.nn.Module, expert_ids: torch.Tensor) -> None:
        """All experts are on the GPU now: those of this call stay. The CPU hears of it when the model is through."""
        ids = method.residents.most_used(expert_ids)
        if self._ring.ranks > 1:
            engine.broadcast_from_first(ids)
        for name in self.weights.names:
            torch.index_select(rows(getattr(self.weights.layer, name)), 0, ids, out=rows(getattr(layer, name)))
        method.residents.move(ids)
        method.plan.moved.append((method, ids))


class _PlainCopies:
    """Experts go straight to their place."""

    def __init__(self, prefill: LayerwisePrefill):
        self._prefill = prefill

    def __call__(self, expert: int, slot: int) -> Callable[[], None]:
        self._prefill.place(self._prefill.weights.layer, expert, slot)
        return self._prefill.sent()

    def finish(self) -> None:
        pass


class _ChunkCopies:
    """Experts are laid out CHUNK at a time."""

    def __init__(self, prefill: LayerwisePrefill):
        self._prefill = prefill
        self._chunk: torch.nn.Module | None = None
        self._experts: list[int] = []

    def __call__(self, expert: int, slot: int) -> Callable[[], None]:
        if self._chunk is None:
            self._chunk = self._prefill.weights.start_chunk()
        self._prefill.place(self._chunk, len(self._experts), slot)
        self._experts.append(expert)
        end = self._prefill.sent()
        if len(self._experts) == CHUNK:
            self.finish()
        return end

    def finish(self) -> None:
        if self._experts:
            self._prefill.weights.finish_chunk(self._chunk, self._experts)
        self._chunk, self._experts = None, []


class CudaQueue:
    """A stream for copies beside the one that computes."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._computed: torch.cuda.Event | None = None

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def copying(self) -> Any:
        if self._computed is not None:
            self._stream.wait_event(self._computed)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def mark(self) -> Callable[[], None]:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event.synchronize

    def wait_for_copies(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def computed(self) -> None:
        self._computed = torch.cuda.Event()
        self._computed.record(torch.cuda.current_stream(self._device))


class HostQueue:
    """The same on CPU tensors, where everything is done when a call returns."""

    def is_capturing(self) -> bool:
        return False

    def copying(self) -> Any:
        return _Nothing()

    def mark(self) -> Callable[[], None]:
        return _nothing

    def wait_for_copies(self) -> None:
        pass

    computed = wait_for_copies


class _Nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _nothing() -> None:
    pass


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, a row for each of its first dimension."""
    return tensor.detach().reshape(tensor.shape[0], -1).view(torch.uint8)


def bare_copy(layer: torch.nn.Module) -> torch.nn.Module:
    """A layer with the attributes of another and no parameters."""
    made = copy.copy(layer)
    for kind in ("_parameters", "_buffers", "_modules"):
        made.__dict__[kind] = {}
    for name, value in layer.__dict__.items():
        if name.startswith("_original") and isinstance(value, dict):  # what methods remember of parameters
            made.__dict__[name] = dict(value)
    return made


def _find(layer: torch.nn.Module, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if isinstance(getattr(layer, name, None), torch.Tensor)), None)

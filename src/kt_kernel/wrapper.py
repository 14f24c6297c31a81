"""KTMoEWrapper: the routed experts of one layer on the CPU, for engines and scripts."""

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kt_kernel import _core, deferral, env, placement, runtime
from kt_kernel.arguments import whole_number
from kt_kernel.methods import check_method
from kt_kernel.slices import write_task
from kt_kernel.tokens import Tokens, as_tokens, empty_output, stream_context, stream_handle

if TYPE_CHECKING:
    import torch

    from kt_kernel.kt_kernel_ext import CPUInfer
    from kt_kernel.weights.progress import Report

_UNLIMITED = 1 << 30  # tokens
# What the core's messages call our arguments.
_OUR_NAMES = {
    "top_k": "num_experts_per_tok",
    "intermediate_size": "moe_intermediate_size",
    " nodes": " sub-pools (threadpool_count)",
}


class KTMoEWrapper:
    """The experts of one MoE layer.

    Give it weights with :meth:`load_weights` or :meth:`load_weights_from_tensors`, then call :meth:`forward`, or
    :meth:`submit_forward` and :meth:`sync_forward` with other work between them. Tokens are CPU tensors (no stream) or
    CUDA tensors, in the order of ``cuda_stream``; in a CUDA graph too.

    Args:
        layer_idx: number of the layer in the model; names its weights, and orders layers for deferral.
        num_experts, num_experts_per_tok, hidden_size, moe_intermediate_size: the layer, unsharded.
        gpu_experts_mask: bool [num_experts], True = on the GPU, skipped here; None = all on the CPU. An int counts as
            ``num_gpu_experts``: experts 0..n-1 are on the GPU.
        cpuinfer_threads: worker threads; None = one for each physical core.
        threadpool_count: sub-pools, each on a NUMA node with its part of every expert; None = one for each node.
        weight_path: folder of the weights, or a file; of a GGUF model that was split, any part.
        chunked_prefill_size: most tokens of one call; None, 0 or -1 = no limit.
        cpu_save: load_weights_from_tensors also writes what it quantised to ``weight_path``.
        max_deferred_experts_per_token: experts of each token that may be added one layer later.
        method: how the weights are kept; see ``kt_kernel.methods``. "auto" = as ``weight_path`` has them, which must
            exist then; the attribute ``method`` tells which it is.
        numa_nodes: NUMA node of each sub-pool.
        mode: only "inference".
        num_gpu_experts: the older way to place experts.
        swiglu_limit, swiglu_alpha: the activation; 0 = silu(gate) * up, unless ``activation`` says otherwise.
        skip_gpu_experts: do not load experts that are on the GPU now; they must stay there. None = what
            KT_KERNEL_SKIP_GPU_EXPERTS says.
        activation: "silu"; "swiglu_alpha", which clamps gates on both sides; "swigluoai", that of gpt-oss, which clamps
            them from above, with 7 and 1.702 where limit and alpha are not given; "gelu_tanh", that of Gemma. None =
            what limit and alpha say; if they say nothing, what the model in ``weight_path`` uses.
        biases: experts have biases. None = if those in ``weight_path`` do.
    """

    def __init__(
        self,
        layer_idx: int,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        moe_intermediate_size: int,
        gpu_experts_mask: "torch.Tensor | Sequence[bool] | int | None" = None,
        cpuinfer_threads: int | None = None,
        threadpool_count: int | None = None,
        weight_path: "str | os.PathLike[str]" = "",
        chunked_prefill_size: int | None = None,
        cpu_save: bool = False,
        max_deferred_experts_per_token: int | None = None,
        method: str = "AMXINT4",
        numa_nodes: Sequence[int] | None = None,
        mode: str = "inference",
        *,
        num_gpu_experts: int | None = None,
        swiglu_limit: float = 0.0,
        swiglu_alpha: float = 0.0,
        skip_gpu_experts: bool | None = None,
        activation: str | None = None,
        biases: bool | None = None,
    ):
        if mode != "inference":
            raise ValueError(f"mode={mode!r}: only 'inference' is offered")
        self.layer_idx = whole_number("layer_idx", layer_idx, 0)
        self.num_experts = whole_number("num_experts", num_experts, 1)
        self.num_experts_per_tok = whole_number("num_experts_per_tok", num_experts_per_tok, 1)
        self.hidden_size = whole_number("hidden_size", hidden_size, 1)
        self.moe_intermediate_size = whole_number("moe_intermediate_size", moe_intermediate_size, 1)
        self.weight_path = _path(weight_path)
        self.chunked_prefill_size = chunked_prefill_size
        self.cpu_save = cpu_save
        self.max_deferred_experts_per_token = whole_number(
            "max_deferred_experts_per_token",
            max_deferred_experts_per_token or 0,
            0,
            self.num_experts_per_tok,
            "num_experts_per_tok",
        )
        self.method = self._find_method() if method == "auto" else method
        check_method(self.method)
        self.skip_gpu_experts = env.skip_gpu_experts() if skip_gpu_experts is None else skip_gpu_experts
        if cpu_save and not self.weight_path:
            raise ValueError("cpu_save=True needs weight_path, the folder to write to")

        runtime.drop_ended_graphs()
        plan = runtime.plan_pool(cpuinfer_threads, threadpool_count, numa_nodes, beside_gpu=_has_gpu())
        self._runtime = runtime.runtime_for(plan)
        self._layer = self._make_layer(biases, activation, swiglu_limit, swiglu_alpha)
        # bool [num_experts] on the CPU, read at every forward: change it in place.
        self.gpu_experts_mask = placement.live_mask(self._layer, self.num_experts)
        placement.fill_mask(self.gpu_experts_mask, gpu_experts_mask, num_gpu_experts)
        self.num_gpu_experts = int(self.gpu_experts_mask.sum())
        # None until weights are loaded.
        self.moe: _core.MoELayer | None = None
        self._model = runtime.model_for(
            self._runtime, self.weight_path, self.hidden_size, self.num_experts_per_tok, self.layer_idx
        )
        self._port = _core.Port(self._model.session, self._layer, self.layer_idx, self.max_deferred_experts_per_token)
        self._submitted_nothing = False  # a call of 0 tokens is in flight
        self._writing = False  # to buffers of a GPU, and not synced

    def _find_method(self) -> str:
        from kt_kernel import weights

        if not self.weight_path:
            raise ValueError("method='auto' needs weight_path, the folder of the weights; it was not given")
        return weights.find_method(self.weight_path, self.layer_idx, self.hidden_size, self.moe_intermediate_size)

    def _make_layer(self, biases: bool | None, activation: str | None, limit: float, alpha: float) -> "_core.MoELayer":
        from kt_kernel import weights

        traits = weights.choose_traits(self.weight_path, self.layer_idx, biases, activation, limit, alpha, self.method)
        weight_format, group_size = weights.choose_format(
            self.method, self.weight_path, self.layer_idx, self.hidden_size, self.moe_intermediate_size
        )
        chunk = self.chunked_prefill_size
        if chunk is not None:
            chunk = whole_number("chunked_prefill_size", chunk, -1)
        try:
            return _core.MoELayer(
                self._runtime.pool,
                format=weight_format,
                num_experts=self.num_experts,
                top_k=self.num_experts_per_tok,
                hidden_size=self.hidden_size,
                intermediate_size=self.moe_intermediate_size,
                max_tokens=_UNLIMITED if chunk is None or chunk < 1 else min(chunk, _UNLIMITED),
                group_size=group_size,
                **traits._asdict(),
            )
        except ValueError as error:
            message = str(error)
            for core, ours in _OUR_NAMES.items():
                message = message.replace(core, ours)
            raise ValueError(message) from None

    @property
    def runtime(self) -> runtime.Runtime:
        """The pool that computes this layer, and its queue."""
        return self._runtime

    @property
    def cpu_infer(self) -> "CPUInfer":
        """The pool and queue of this layer, as ``kt_kernel_ext`` shows them."""
        from kt_kernel.kt_kernel_ext import CPUInfer

        return CPUInfer.of(self._runtime)

    # Weights

    def load_weights(
        self,
        physical_to_logical_map: "torch.Tensor | Sequence[int] | None" = None,
        *,
        store: "str | os.PathLike[str] | None" = None,
        progress: "Report | None" = None,
    ) -> None:
        """Loads the experts of this layer from ``weight_path``. Slot p gets logical expert ``map[p]``; None = p.

        With a folder ``store``, or KT_KERNEL_WEIGHT_STORE, they are also kept there as packed, and the next start reads
        that. ``progress(done, total)`` replaces the bar that a terminal gets after a second.
        """
        from kt_kernel import weights

        if not self.weight_path:
            raise ValueError("load_weights() needs weight_path, the folder of the weights; it was not given")
        logical_ids = self._begin_load(physical_to_logical_map)
        weights.load_layer(
            self._layer,
            self.method,
            self.weight_path,
            self.layer_idx,
            logical_ids,
            skip=self._skipped(),
            progress=progress,
            store=env.weight_store() if store is None else store,
        )
        self.moe = self._layer

    def load_weights_from_tensors(
        self,
        gate_proj: "torch.Tensor | None",
        up_proj: "torch.Tensor",
        down_proj: "torch.Tensor",
        physical_to_logical_map: "torch.Tensor | Sequence[int] | None" = None,
        biases: "tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None" = None,
    ) -> None:
        """Loads experts from tensors [E, I, H], [E, I, H] and [E, H, I], quantising them for ``method``.

        Where experts have biases these are [E, I], [E, I] and [E, H], of gate, up and down. Where the activation has no
        gates ("relu2") gate_proj is None.
        Writes what it quantised to ``weight_path`` if ``cpu_save`` was given, and nothing otherwise.
        """
        from kt_kernel import weights

        logical_ids = self._begin_load(physical_to_logical_map)
        weights.load_layer_from_tensors(
            self._layer,
            self.method,
            gate_proj,
            up_proj,
            down_proj,
            logical_ids,
            skip=self._skipped(),
            save_to=self.weight_path if self.cpu_save else None,
            layer_idx=self.layer_idx,
            biases=biases,
        )
        self.moe = self._layer

    def load_random_weights(self, seed: int) -> None:
        """Random weights in every expert, for measurements."""
        self._begin_load(None)
        self._layer.fill_random(seed)
        self.moe = self._layer

    def _begin_load(self, physical_to_logical_map: "torch.Tensor | Sequence[int] | None") -> list[int]:
        """Logical ids of the slots. Until the load has ended there are no weights: an interrupt leaves some of each."""
        if self._port.in_flight:
            raise RuntimeError("weights cannot change between submit_forward and sync_forward; call sync_forward first")
        if self._writing:
            raise RuntimeError(
                "weights cannot change between submit_write_weight_scale_to_buffer and "
                "sync_write_weight_scale_to_buffer; sync first"
            )
        logical_ids = placement.logical_ids(physical_to_logical_map, self.num_experts)
        self.moe = None
        return logical_ids

    def _skipped(self) -> list[bool] | None:
        return self.gpu_experts_mask.tolist() if self.skip_gpu_experts else None

    # Forward

    def submit_forward(
        self,
        hidden_states: "torch.Tensor",
        topk_ids: "torch.Tensor",
        topk_weights: "torch.Tensor",
        cuda_stream: "int | torch.cuda.Stream | None" = None,
    ) -> None:
        """Starts a forward and returns. The tensors may be changed at once (on a GPU: in the order of the stream).

        hidden_states: [..., H]; topk_ids: int32 or int64 [q, K], an id outside 0..E-1 is skipped; topk_weights:
        [q, K], applied as they are.
        """
        self._need_weights()
        tokens = as_tokens(hidden_states, topk_ids, topk_weights, self.hidden_size, self.num_experts_per_tok)
        self._submitted_nothing = tokens.count == 0
        if tokens.on_gpu:
            self._submit_on(tokens, stream_handle(cuda_stream, hidden_states.device))
        else:
            _refuse_stream(cuda_stream, hidden_states.device)
            if tokens.count:
                self._port.submit(*tokens.addresses())

    def _need_weights(self) -> None:
        if self.moe is None:
            raise RuntimeError(
                f"layer {self.layer_idx} has no weights; call load_weights() or load_weights_from_tensors() first"
            )

    def _submit_on(self, tokens: Tokens, stream: int) -> None:
        with stream_context(tokens.hidden.device, stream):
            if tokens.count and (lease := self._port.submit_on(stream, *tokens.addresses())):
                runtime.keep_for_graph(lease, self)

    def sync_forward(
        self, hidden_states: "torch.Tensor", cuda_stream: "int | torch.cuda.Stream | None" = None
    ) -> "torch.Tensor":
        """The result of the call before: a new tensor [q, H] like ``hidden_states``, which is otherwise not looked at.

        On a GPU it returns at once and the stream waits.
        """
        count = hidden_states.numel() // self.hidden_size
        stream = stream_handle(cuda_stream, hidden_states.device)
        with stream_context(hidden_states.device, stream):
            output = empty_output(hidden_states.device, count, self.hidden_size)
            if self._submitted_nothing and count == 0:
                self._submitted_nothing = False
            elif hidden_states.is_cuda:
                self._port.sync_on(stream, count, output.data_ptr())
            else:
                _refuse_stream(cuda_stream, hidden_states.device)
                self._port.sync(count, output.data_ptr())
            return output.to(hidden_states.dtype)

    def forward(
        self,
        hidden_states: "torch.Tensor",
        topk_ids: "torch.Tensor",
        topk_weights: "torch.Tensor",
        cuda_stream: "int | torch.cuda.Stream | None" = None,
    ) -> "torch.Tensor":
        """submit_forward and sync_forward."""
        self.submit_forward(hidden_states, topk_ids, topk_weights, cuda_stream)
        return self.sync_forward(hidden_states, cuda_stream)

    def select_deferred_experts(
        self, expert_ids: "torch.Tensor", expert_scores: "torch.Tensor", protected_k: int
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """(immediate_ids, deferred_ids) of a batch; see :func:`kt_kernel.deferral.split_experts`."""
        return deferral.split_experts(expert_ids, expert_scores, protected_k, self.num_experts)

    # Experts for a GPU

    def submit_write_weight_scale_to_buffer(
        self,
        gpu_tp_count: int,
        expert_id: int,
        w13_weight_ptrs: Sequence[int],
        w13_scale_ptrs: Sequence[int],
        w2_weight_ptrs: Sequence[int],
        w2_scale_ptrs: Sequence[int],
    ) -> None:
        """Starts to write physical expert ``expert_id``, whatever the mask says, for each rank of a GPU; returns.

        The lists have the host address of each rank's buffer. With n = I / gpu_tp_count, rank r gets rows
        [r n, (r + 1) n) of gate, then of up, in w13, and these columns of down, of all rows, in w2: row-major, in the
        bytes of the checkpoint. Scales are those the weights have: f32 of FP8, and of FP8_PERCHANNEL, where w2 gets all
        H; e8m0 of MXFP8; bf16 of RAWINT4 and MXFP4. BF16 has none, and ignores their lists. A scale that weights of two
        ranks share goes to both: where a block of b rows or columns does not divide n, rank r gets blocks r n // b to
        ceil((r + 1) n / b) - 1, which may be one more than n / b. ``moe.slice_bytes(gpu_tp_count)`` has the sizes.
        """
        self._need_weights()
        task = write_task(
            self._layer,
            self.num_experts,
            gpu_tp_count,
            expert_id,
            w13_weight_ptrs,
            w13_scale_ptrs,
            w2_weight_ptrs,
            w2_scale_ptrs,
        )
        self._runtime.submit(task)
        self._writing = True

    def sync_write_weight_scale_to_buffer(self, allow_n_pending: int = 0) -> None:
        """Waits until all that was submitted to this pool is done, but for the last ``allow_n_pending`` tasks."""
        left = whole_number("allow_n_pending", allow_n_pending, 0)
        try:
            self._runtime.queue.sync(left)
        finally:
            self._writing = left > 0

    # Buffers of all wrappers

    @staticmethod
    def set_capture_batch_sizes(capture_bs: Iterable[int]) -> None:
        """Names the batch sizes that CUDA graphs will be captured for.

        Any size can be captured: memory of a graph is made when it is captured and lives as long as the graph.
        """
        global _capture_batch_sizes
        if not isinstance(capture_bs, Iterable):
            raise TypeError(f"capture_bs={capture_bs!r} is a {type(capture_bs).__name__}; pass a list of batch sizes")
        _capture_batch_sizes = [whole_number("a size of capture_bs", size, 1) for size in capture_bs]

    @staticmethod
    def get_capture_batch_sizes() -> list[int]:
        return list(_capture_batch_sizes)

    @staticmethod
    def clear_buffer_cache() -> None:
        """Frees host memory of finished calls. What a captured graph uses stays."""
        runtime.clear_stages(_cuda_is_idle())


_capture_batch_sizes: list[int] = []


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _cuda_is_idle() -> bool:
    """Waits for the GPU, unless a graph is being captured."""
    import torch

    if not torch.cuda.is_initialized():
        return True
    if torch.cuda.is_current_stream_capturing():
        return False
    torch.cuda.synchronize()
    return True


def _refuse_stream(cuda_stream: object, device: "torch.device") -> None:
    if stream_handle(cuda_stream, device) != 0:
        raise ValueError(f"cuda_stream={cuda_stream!r} was given with CPU tensors; pass None, or CUDA tensors")


def _path(weight_path: object) -> str:
    try:
        path = os.fspath(weight_path)
    except TypeError:
        path = None
    if not isinstance(path, str):
        raise TypeError(f"weight_path={weight_path!r} is a {type(weight_path).__name__}; pass a str or a Path")
    return path

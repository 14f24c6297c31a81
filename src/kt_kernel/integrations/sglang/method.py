"""KTEPWrapperMethod: a layer's hot experts on the GPU by SGLang's method, its cold ones on the CPU.

out = gpu(x, ids of hot experts) + cpu(x, ids of cold experts). The CPU's part has a stream of its own: its copies and
its wait lie beside the GPU's experts, and the main stream waits once, before the sum. With tensor parallelism the
first rank alone has the CPU's experts, whole; its sum is what the model's reduction adds to the others'.
"""

import copy
import inspect
import types
from typing import Any

import torch

from kt_kernel import KTMoEWrapper
from kt_kernel.integrations.sglang import engine
from kt_kernel.integrations.sglang.plan import ModelPlan
from kt_kernel.integrations.sglang.prefill import LayerwisePrefill, bare_copy
from kt_kernel.integrations.sglang.residents import Residents

_streams: dict[torch.device, "torch.cuda.Stream"] = {}


def method_class(original: type) -> type:
    """A subclass of SGLang's class, with its name: SGLang asks for both."""

    class KTEPWrapperMethod(_Method, original):
        pass

    KTEPWrapperMethod.__module__ = original.__module__
    KTEPWrapperMethod.__qualname__ = original.__qualname__
    return KTEPWrapperMethod


class _Method:
    def __init__(self, gpu_method: Any, kt_config: Any):
        super().__init__(gpu_method, kt_config)
        self.plan: ModelPlan = kt_config.plan
        # SGLang's loader would drop experts from this id on; which ones are wanted, load_place knows.
        self.num_gpu_experts = -1
        self.residents: Residents | None = None
        self.weight_arguments: dict[str, Any] = {}
        self.prefill: LayerwisePrefill | None = None
        self._cpu_factor = 1.0

    # Making

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **more: Any,
    ) -> None:
        self._refuse(layer)
        self.residents = self.plan.residents(self.kt_config.layer_idx, num_experts)
        self.weight_arguments = {
            "hidden_size": hidden_size,
            "intermediate_size_per_partition": intermediate_size_per_partition,
            "params_dtype": params_dtype,
            **more,
        }
        self.gpu_method.num_gpu_experts = self.residents.count
        self.gpu_method.create_weights(layer=layer, num_experts=self.residents.count, **self.weight_arguments)
        if self.tp_rank == 0 and self.residents.count < num_experts:
            self.wrapper = self._make_wrapper(layer, num_experts, hidden_size)

    def _refuse(self, layer: torch.nn.Module) -> None:
        if getattr(layer, "moe_ep_size", 1) > 1:
            raise ValueError(
                "--kt-weight-path splits experts between GPU and CPU, and --ep-size between GPUs; use --ep-size 1"
            )
        if getattr(layer, "num_fused_shared_experts", 0):
            raise ValueError("--kt-weight-path needs --disable-shared-experts-fusion: the CPU has routed experts only")

    def _make_wrapper(self, layer: torch.nn.Module, num_experts: int, hidden_size: int) -> KTMoEWrapper:
        config = self.kt_config
        deferred = config.max_deferred_experts_per_token or 0
        nodes = self.plan.options.kt_numa_nodes
        return KTMoEWrapper(
            layer_idx=config.layer_idx,
            num_experts=num_experts,
            num_experts_per_tok=layer.top_k,
            hidden_size=hidden_size,
            moe_intermediate_size=layer.intermediate_size_per_partition * layer.moe_tp_size,
            gpu_experts_mask=self.residents.mask,
            cpuinfer_threads=config.cpuinfer_threads,
            threadpool_count=config.threadpool_count,
            weight_path=config.weight_path,
            # Any number: with data-parallel attention a call has the tokens of several chunks.
            chunked_prefill_size=None,
            method=config.method,
            max_deferred_experts_per_token=0 if config.layer_idx == self.plan.last_layer else deferred,
            numa_nodes=None if nodes is None else list(nodes),
            swiglu_limit=getattr(getattr(layer, "moe_runner_config", None), "swiglu_limit", None) or 0.0,
        )

    def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: Any) -> None:
        self.moe_runner_config = moe_runner_config
        moe_runner_config.num_local_experts = self.residents.count
        moe_runner_config.inplace = False  # the CPU may not have read x when the GPU writes
        factor = getattr(moe_runner_config, "routed_scaling_factor", None)
        if factor not in (None, 1.0):
            if engine.model_scales_output():
                moe_runner_config.routed_scaling_factor = None
            else:
                self._cpu_factor = float(factor)
        self.gpu_method.create_moe_runner(layer, moe_runner_config)

    def another_gpu_method(self, layer: torch.nn.Module) -> Any:
        """The GPU's method once more, for another layer object, which gets a scheme of its own too."""
        if getattr(layer, "scheme", None) is not None:
            layer.scheme = _another(layer.scheme)
        return _another(self.gpu_method)

    # Loading

    def load_place(self, expert: int) -> int:
        """Where weights of an expert go on the GPU, or -1."""
        return self.residents.place(expert)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        as_loaded = bare_copy(layer)
        if self.residents.count and hasattr(self.gpu_method, "process_weights_after_loading"):
            self.gpu_method.process_weights_after_loading(layer)
        device = next(layer.parameters()).device
        self.residents.to(device)
        if self.wrapper is not None:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # weights of the layer before are read while their copies run
            self.wrapper.load_weights(engine.logical_ids(self.kt_config.layer_idx, self.residents.num_experts))
        if self.residents.count < self.residents.num_experts:
            self.prefill = self.plan.prefill_for(self, layer, as_loaded)

    def move_residents(self, ids: list[int]) -> None:
        """The host hears which experts are on the GPU now; no call of this layer may be under way."""
        self.residents.move_on_host(ids)
        if self.wrapper is not None:
            self.wrapper.gpu_experts_mask.copy_(self.residents.mask)

    # Forward

    def apply(self, layer: torch.nn.Module, dispatch_output: Any) -> Any:
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        dispatch_output = _standard(dispatch_output)
        x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
        if self.prefill is not None and self.prefill.takes(x.shape[0]):
            combined = self.prefill.apply(self, layer, dispatch_output)
            self.plan.end_of_layer(self)
            return combined
        stream = self._submit(x, topk)
        output = None
        if self.residents.count:
            hot = topk._replace(topk_ids=self.residents.places(topk.topk_ids))
            output = self.gpu_method.apply(layer, dispatch_output._replace(topk_output=hot)).hidden_states
        if self.wrapper is not None:
            cold = self._collect(x, stream)
            output = cold if output is None else output + cold
        return StandardCombineInput(hidden_states=torch.zeros_like(x) if output is None else output)

    def _submit(self, x: torch.Tensor, topk: Any) -> "torch.cuda.Stream | None":
        if self.moe_runner_config.activation != "silu":
            raise ValueError(f"experts with {self.moe_runner_config.activation} cannot be on the CPU through SGLang")
        if self.wrapper is None:
            return None
        if not x.is_cuda:
            self.wrapper.submit_forward(x, topk.topk_ids, topk.topk_weights)
            return None
        stream = _streams.get(x.device) or _streams.setdefault(x.device, torch.cuda.Stream(x.device))
        stream.wait_stream(torch.cuda.current_stream(x.device))
        self.wrapper.submit_forward(x, topk.topk_ids, topk.topk_weights, stream.cuda_stream)
        return stream

    def _collect(self, x: torch.Tensor, stream: "torch.cuda.Stream | None") -> torch.Tensor:
        cold = self.wrapper.sync_forward(x, None if stream is None else stream.cuda_stream)
        if stream is not None:
            # Memory of `cold` is the stream's; it is used again only by calls that wait for the main stream first.
            torch.cuda.current_stream(x.device).wait_stream(stream)
        return cold if self._cpu_factor == 1.0 else cold * self._cpu_factor


def _standard(dispatch_output: Any) -> Any:
    """Routing as ids and weights; some GPU methods would do it themselves."""
    topk = dispatch_output.topk_output
    if not hasattr(topk, "topk_ids"):
        if not hasattr(topk, "to_standard"):
            raise ValueError(
                f"--moe-runner-backend leaves routing as {type(topk).__name__}, unreadable for the CPU; choose triton"
            )
        dispatch_output = dispatch_output._replace(topk_output=topk.to_standard())
    return dispatch_output


def _another(thing: Any) -> Any:
    """A copy that does not lead back: methods that an object keeps of itself become the copy's."""
    made = copy.copy(thing)
    for name, value in vars(thing).items():
        if inspect.ismethod(value) and value.__self__ is thing:
            made.__dict__[name] = types.MethodType(value.__func__, made)
    return made

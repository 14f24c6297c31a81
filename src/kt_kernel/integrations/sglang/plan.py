"""What holds for all layers of the model that an SGLang process has: options, placement, room for long prompts."""

from typing import TYPE_CHECKING, Any

import torch

from kt_kernel.expert_counts import read_expert_counts
from kt_kernel.integrations.sglang import engine
from kt_kernel.integrations.sglang.options import DEFAULTS, Options, flag
from kt_kernel.integrations.sglang.residents import Residents
from kt_kernel.placement import gpu_budget, place_experts
from kt_kernel.weights.config import FIELD_NAMES, layers_with_experts

if TYPE_CHECKING:
    from kt_kernel.integrations.sglang.prefill import LayerwisePrefill
    from kt_kernel.integrations.sglang.record import MaskRecord


class ModelPlan:
    def __init__(self, server_args: Any):
        self.server_args = server_args
        self.options: Options = getattr(server_args, "_kt_options", DEFAULTS)
        self.moved: list[tuple[Any, torch.Tensor]] = []  # methods, and their residents of which the CPU has not heard
        self._streamed: dict[int, Any] = {}  # methods that long prompts are streamed for, by layer
        fields = engine.text_config(server_args)
        self.num_layers = next((fields[name] for name in FIELD_NAMES["num_layers"] if fields.get(name)), 0)
        if not self.num_layers:
            raise ValueError(f"config.json of {server_args.model_path} does not say how many layers there are")
        self.moe_layers = layers_with_experts(f"config.json of {server_args.model_path}", fields, self.num_layers)
        self.last_layer = self.moe_layers[-1]
        self._masks: torch.Tensor | None = None
        self._residents: dict[int, Residents] = {}
        self._gpu_masks: torch.Tensor | None = None
        self.record: MaskRecord | None = None
        self._prefills: dict[tuple, LayerwisePrefill | None] = {}

    def residents(self, layer_idx: int, num_experts: int) -> Residents:
        """Experts of a layer that are on the GPU at the start, the same on every rank."""
        if self._masks is None:
            self._masks = self._place(num_experts)
            self.record = self._make_record(num_experts)
        if layer_idx >= self.num_layers or num_experts != self._masks.shape[1]:
            raise ValueError(
                f"layer {layer_idx} with {num_experts} experts does not belong to a model of {self.num_layers} layers "
                f"with {self._masks.shape[1]} each; experts on the CPU need the same number in all layers"
            )
        self._residents[layer_idx] = Residents(self._masks[layer_idx])
        self._gpu_masks = None
        return self._residents[layer_idx]

    def gpu_masks(self) -> torch.Tensor:
        """Experts that this process's CPU does not compute now, bool [layers, E]; another tensor once they moved."""
        if self._gpu_masks is None:
            masks = torch.ones_like(self._masks)
            for layer_idx, residents in self._residents.items():
                masks[layer_idx] = residents.mask
            self._gpu_masks = masks
        return self._gpu_masks

    def _make_record(self, num_experts: int) -> "MaskRecord | None":
        if not self.options.record_kt_gpu_expert_distribution or engine.tensor_group()[0] != 0:
            return None
        from kt_kernel.integrations.sglang.record import MaskRecord

        return MaskRecord(self.num_layers, num_experts, engine.recorder_passes(self.server_args))

    def _place(self, num_experts: int) -> torch.Tensor:
        options, count = self.options, self.server_args.kt_num_gpu_experts
        budget = gpu_budget(count, options.kt_gpu_experts_ratio, num_experts, len(self.moe_layers))
        counts = None
        if options.kt_expert_placement_strategy == "frequency":
            if options.statistics is None:
                engine.log.warning("frequency without --init-expert-location: all experts count as equally used")
            else:
                counts = read_expert_counts(options.statistics, self.num_layers, num_experts)
        masks = place_experts(
            options.kt_expert_placement_strategy, budget, self.moe_layers, self.num_layers, num_experts, counts
        )
        rank, ranks = engine.tensor_group()
        if ranks > 1:
            engine.broadcast_from_first(masks)
        if rank == 0:
            if count is None and options.kt_gpu_experts_ratio is None:
                engine.log.warning("no --kt-num-gpu-experts or --kt-gpu-experts-ratio: all experts are on the CPU")
            total = len(self.moe_layers) * num_experts
            how = options.kt_expert_placement_strategy
            engine.log.info(f"{budget} of {total} experts are on the GPU, placed by {how}; the CPU has all of them")
        return masks

    def prefill_for(self, method: Any, layer: torch.nn.Module, as_loaded: torch.nn.Module) -> "LayerwisePrefill | None":
        """Room for all experts of a layer like this one, made for the first; None where it was not asked for."""
        if not self.options.kt_gpu_prefill_token_threshold:
            return None
        from kt_kernel.integrations.sglang.prefill import make_prefill

        shapes = [(name, value.shape[1:], value.dtype) for name, value in layer.named_parameters()]
        key = (type(method.gpu_method), *shapes)
        if key not in self._prefills:
            made, reason = make_prefill(
                method,
                as_loaded,
                next(layer.parameters()).device,
                self.options.kt_gpu_prefill_token_threshold,
                self.options.kt_enable_dynamic_expert_update,
            )
            if reason:
                engine.log.warning(f"{flag('kt_gpu_prefill_token_threshold')} is left out: {reason}")
            elif engine.tensor_group()[0] == 0:
                tokens, room = self.options.kt_gpu_prefill_token_threshold, made.weights.bytes / 1e9
                engine.log.info(
                    f"calls of {tokens} tokens and more: {room:.2f} GB of each GPU hold one layer's experts"
                )
            self._prefills[key] = made
        if self._prefills[key] is not None:
            self._streamed[method.kt_config.layer_idx] = method
        return self._prefills[key]

    def streamed_after(self, method: Any) -> Any:
        """The next method that streams through the same room, or None after the last one."""
        later = min((layer for layer in self._streamed if layer > method.kt_config.layer_idx), default=None)
        follower = None if later is None else self._streamed[later]
        return follower if follower is not None and follower.prefill is method.prefill else None

    def end_of_layer(self, method: Any) -> None:
        """After the last layer of a long prompt masks of the CPU follow; the next call reads them."""
        if method.kt_config.layer_idx == max(self._streamed):
            moved, self.moved = self.moved, []
            if moved:
                self._gpu_masks = None
            for mover, ids in moved:
                mover.move_residents(ids.tolist())  # waits for the GPU, which then has done all calls before


_plan: ModelPlan | None = None


def current_plan() -> ModelPlan | None:
    """The plan of the model that this process has; None without experts on the CPU."""
    return _plan


def plan_for(server_args: Any) -> ModelPlan:
    """The plan of the model that this process builds; another record of arguments is another model."""
    global _plan
    if _plan is None or _plan.server_args is not server_args:
        _plan = ModelPlan(server_args)
    return _plan

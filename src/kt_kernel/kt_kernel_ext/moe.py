"""Layers on addresses: configurations with pointers in, tasks for CPUInfer out. bf16 weights, quantised when loaded."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kt_kernel import _core
from kt_kernel.slices import write_task

if TYPE_CHECKING:
    import numpy as np

# What is larger is an address: Linux maps nothing below 64 KB, and the heap of a Python that is not
# position-independent may begin below 1 GB.
_LARGEST_COUNT = (1 << 16) - 1


@dataclass
class QuantConfig:
    quant_method: str = ""
    bits: int = 0
    group_size: int = 0
    zero_point: bool = False
    per_channel: bool = False


@dataclass
class MOEConfig:
    """A layer; addresses are integers, 0 = not given.

    The fifth argument is the number of experts on the GPU (ids below it), or the address of num_experts bytes that are
    1 for experts on the GPU.
    """

    expert_num: int
    num_experts_per_tok: int
    hidden_size: int
    intermediate_size: int
    placement: int = 0
    num_gpu_experts: int = field(init=False, default=0)
    gpu_experts_mask: int = field(init=False, default=0)
    layer_idx: int = 0
    pool: object = None  # CPUInfer.backend_
    max_len: int = 0
    path: str = ""
    save: bool = False
    load: bool = False
    m_block: int = 0
    group_min_len: int = 0
    group_max_len: int = 0
    gate_type: int = 0
    up_type: int = 0
    down_type: int = 0
    hidden_type: int = 0
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 0.0
    quant_config: QuantConfig = field(default_factory=QuantConfig)
    physical_to_logical_map: int = 0  # int64 [expert_num]
    gate_proj: int = 0  # bf16 [expert_num, I, H]
    up_proj: int = 0
    down_proj: int = 0  # bf16 [expert_num, H, I]
    # One address for each expert, in the list of the only shard.
    gate_projs: list[list[int]] = field(default_factory=list)
    up_projs: list[list[int]] = field(default_factory=list)
    down_projs: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.placement > _LARGEST_COUNT:
            self.gpu_experts_mask = self.placement
        else:
            self.num_gpu_experts = self.placement


class _Layer:
    """The experts of a MOEConfig in one format."""

    format: str

    def __init__(self, config: MOEConfig):
        if config.pool is None:
            raise ValueError("MOEConfig.pool is not set; give it CPUInfer.backend_")
        if config.max_len < 1:
            raise ValueError(f"MOEConfig.max_len is {config.max_len}; set it to the most tokens of one call")
        if not 0 <= config.num_gpu_experts <= config.expert_num:
            raise ValueError(
                f"MOEConfig.num_gpu_experts is {config.num_gpu_experts}; it must be in 0..{config.expert_num} "
                "(expert_num)"
            )
        self._config = config
        self._layer = _core.MoELayer(
            config.pool.pool,
            format=self.format,
            num_experts=config.expert_num,
            top_k=config.num_experts_per_tok,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            max_tokens=config.max_len,
            swiglu_limit=config.swiglu_limit,
            swiglu_alpha=config.swiglu_alpha,
        )
        mask = (ctypes.c_uint8 * config.expert_num).from_address(self._layer.mask_address)
        mask[: config.num_gpu_experts] = [1] * config.num_gpu_experts

    def load_weights(self, physical_to_logical_map: int = 0) -> None:
        config, experts = self._config, self._config.expert_num
        address = physical_to_logical_map or config.physical_to_logical_map
        logical = (ctypes.c_int64 * experts).from_address(address) if address else range(experts)
        rows = (config.intermediate_size, config.hidden_size)
        shapes = {"gate": rows, "up": rows, "down": rows[::-1]}
        for slot, expert in enumerate(logical):
            if not 0 <= expert < experts:
                raise ValueError(f"physical_to_logical_map[{slot}] is {expert}; it must be in 0..{experts - 1}")
            self._layer.load_expert(slot, *(self._matrix(name, expert, shape) for name, shape in shapes.items()))

    def load_weights_task(self, physical_to_logical_map: int = 0) -> Callable[[], None]:
        return lambda: self.load_weights(physical_to_logical_map)

    def warm_up(self) -> None:
        """Nothing: memory is made when the layer is."""

    def warm_up_task(self) -> Callable[[], None]:
        return self.warm_up

    def forward_task(
        self, n_tokens: int, top_k: int, ids: int, weights: int, input: int, output: int, incremental: bool = False
    ) -> "_core.ForwardTask":
        """A forward of ``*n_tokens`` (int32) tokens: int64 ids, f32 weights, bf16 in and out, all read when it runs."""
        skip = self._config.gpu_experts_mask
        return _core.ForwardTask(self._layer, n_tokens, top_k, ids, weights, input, output, incremental, skip)

    def write_weight_scale_to_buffer_task(
        self,
        gpu_tp_count: int,
        expert_id: int,
        w13_weight_ptrs: list[int],
        w13_scale_ptrs: list[int],
        w2_weight_ptrs: list[int],
        w2_scale_ptrs: list[int],
    ) -> "_core.WriteSlicesTask":
        """As :meth:`kt_kernel.KTMoEWrapper.submit_write_weight_scale_to_buffer`, for ``CPUInfer.submit``."""
        pointers = (w13_weight_ptrs, w13_scale_ptrs, w2_weight_ptrs, w2_scale_ptrs)
        return write_task(self._layer, self._config.expert_num, gpu_tp_count, expert_id, *pointers)

    def forward(
        self, n_tokens: int, top_k: int, ids: int, weights: int, input: int, output: int, incremental: bool = False
    ) -> None:
        pool = self._config.pool
        pool.submit(self.forward_task(n_tokens, top_k, ids, weights, input, output, incremental))
        pool.queue.sync()

    def _matrix(self, name: str, expert: int, shape: tuple[int, int]) -> "np.ndarray":
        import numpy as np

        listed, whole = getattr(self._config, f"{name}_projs"), getattr(self._config, f"{name}_proj")
        if listed:
            if len(listed) != 1:
                raise ValueError(f"MOEConfig.{name}_projs has {len(listed)} shards; give whole experts, in one list")
            address = listed[0][expert]
        elif whole:
            address = whole + 2 * expert * shape[0] * shape[1]
        else:
            raise ValueError(f"neither MOEConfig.{name}_proj nor MOEConfig.{name}_projs is set")
        bits = (ctypes.c_uint16 * (shape[0] * shape[1])).from_address(address)
        return np.ctypeslib.as_array(bits).reshape(shape)


def _classes() -> dict[str, type]:
    names = {
        "bf16": ("AMXBF16_MOE", "AVX2BF16_MOE"),
        "int8": ("AMXInt8_MOE", "Int8_KERNEL_MOE"),
        "int4": ("AMXInt4_MOE", "Int4_KERNEL_MOE"),
        "int4g": ("AMXInt4_1KGroup_MOE",),
    }
    return {name: type(name, (_Layer,), {"format": fmt}) for fmt, all_names in names.items() for name in all_names}


globals().update(_classes())

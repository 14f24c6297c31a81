"""KTConfig: what a user says about the experts of a model."""

import os
from collections.abc import Sequence

from transformers.utils.quantization_config import QuantizationConfigMixin

from kt_kernel.arguments import whole_number
from kt_kernel.hf.linear import FORMATS
from kt_kernel.methods import check_method

NAME = "kt"
AUTO = "auto"


class KTConfig(QuantizationConfigMixin):
    """For ``from_pretrained(path, quantization_config=KTConfig(...))``.

    Args:
        method: "auto", as the files have the experts, or a method of ``kt_kernel.methods``: BF16, AMXINT8, AMXINT4 and
            INT4G quantise while they load.
        weight_path: where the experts are, if not with the rest of the model: converted weights, or GGUF.
        threads: worker threads; None = one for each physical core.
        subpools: NUMA nodes to spread over; None = all.
        numa_nodes: the node of each sub-pool.
        store: a folder that keeps packed experts for the next start; None = what KT_KERNEL_WEIGHT_STORE says.
        linears: how the other linears of a model on the CPU are packed: "bf16", "int8", "int4" or "int4g"; "auto" =
            what loses nothing and is faster than torch here; None = torch keeps them.
        gpu_experts: of a model on a GPU, the experts that are computed there: a count, the first n of each layer, or
            bool [layers with experts, experts], such as ``kt_kernel.generate_gpu_experts_masks`` makes.
    """

    def __init__(
        self,
        method: str = AUTO,
        weight_path: "str | os.PathLike[str] | None" = None,
        threads: int | None = None,
        subpools: int | None = None,
        numa_nodes: Sequence[int] | None = None,
        store: "str | os.PathLike[str] | None" = None,
        linears: str | None = None,
        gpu_experts: "int | Sequence[Sequence[bool]]" = 0,
    ):
        self.quant_method = NAME
        if method != AUTO:
            check_method(method)
        self.method = method
        self.weight_path = None if weight_path is None else os.fspath(weight_path)
        if self.weight_path is not None and not os.path.exists(self.weight_path):
            raise FileNotFoundError(
                f"weight_path {self.weight_path} does not exist; it is a folder of weights, or one safetensors or GGUF "
                "file; leave it out if the experts are with the rest of the model"
            )
        self.threads, self.subpools = threads, subpools
        self.numa_nodes = None if numa_nodes is None else list(numa_nodes)
        self.store = None if store is None else os.fspath(store)
        if linears not in (None, AUTO, *FORMATS):
            raise ValueError(f"linears={linears!r} is unknown; it is None, {AUTO!r}, or one of {', '.join(FORMATS)}")
        self.linears = linears
        self.gpu_experts = _placement(gpu_experts)

    @classmethod
    def from_dict(cls, config_dict: dict, return_unused_kwargs: bool = False, **kwargs):
        fields = {name: value for name, value in config_dict.items() if name != "quant_method"}
        return super().from_dict(fields, return_unused_kwargs, **kwargs)

    def gpu_mask(self, layer: int, layers: int, experts: int) -> list[bool]:
        """Of the layer-th of the layers with experts."""
        if isinstance(self.gpu_experts, int):
            whole_number("gpu_experts", self.gpu_experts, 0, experts, "the number of experts")
            return [expert < self.gpu_experts for expert in range(experts)]
        if len(self.gpu_experts) != layers or len(self.gpu_experts[layer]) != experts:
            raise ValueError(
                f"gpu_experts has {len(self.gpu_experts)} rows, of {len(self.gpu_experts[0])} in the first; this model "
                f"needs [{layers}, {experts}]: layers with experts, experts"
            )
        return self.gpu_experts[layer]


def _placement(gpu_experts: object) -> int | list[list[bool]]:
    """Plain values, which a config can be written with."""
    if hasattr(gpu_experts, "tolist"):
        gpu_experts = gpu_experts.tolist()
    if not isinstance(gpu_experts, Sequence):
        return whole_number("gpu_experts", gpu_experts, 0)
    rows = [list(row) if isinstance(row, Sequence) else row for row in gpu_experts]
    if not rows or not all(isinstance(row, list) and all(isinstance(flag, bool) for flag in row) for row in rows):
        raise TypeError("gpu_experts must be a count, or a bool tensor or lists [layers with experts, experts]")
    return rows

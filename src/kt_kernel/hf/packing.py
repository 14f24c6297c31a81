"""Fills the layer of a module: from files, or from the tensors that transformers made."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers.core_model_loading import ConversionOps

from kt_kernel import KTMoEWrapper
from kt_kernel.hf.config import AUTO, KTConfig
from kt_kernel.hf.experts import ExpertsModule, split_first, straight_down
from kt_kernel.hf.forward import GpuExperts, KTLayer
from kt_kernel.weights.progress import Report


class Filler:
    """One module of experts, until its layer is filled."""

    def __init__(self, found: ExpertsModule, config: KTConfig, gpu_mask: list[bool], path: Path | None):
        """Without a path the experts come as tensors."""
        self.found, self._config, self._gpu_mask, self._path = found, config, gpu_mask, path
        self._tensors: dict[str, torch.Tensor] = {}
        self._layer: KTLayer | None = None

    @property
    def splits(self) -> bool:
        return any(self._gpu_mask)

    @property
    def dropped(self) -> list[str]:
        """Parameters that transformers must not load. Biases of experts on a GPU are so small that it may."""
        matrices = [name for name in self.found.parameters if not name.endswith("_bias")]
        return matrices if self.splits else self.found.parameters

    def fill_from_files(self, progress: Report | None = None) -> None:
        wrapper = self._make_wrapper(self._config.method, str(self._path))
        wrapper.load_weights(store=self._config.store, progress=progress)
        biases = None
        if self.splits and self.found.module.has_bias:
            names = set(self.found.parameters) - set(self.dropped)
            biases = {name: getattr(self.found.module, name) for name in names}
        self._finish(wrapper, biases)

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """A parameter of the module; with the last one the layer is filled, and none is kept."""
        self._tensors[name] = tensor.detach().cpu()
        if all(needed in self._tensors for needed in self.found.parameters):
            self._fill_from_tensors()

    @property
    def missing(self) -> list[str]:
        return [name for name in self.found.parameters if name not in self._tensors]

    def _fill_from_tensors(self) -> None:
        found, tensors = self.found, self._tensors
        wrapper = self._make_wrapper("BF16" if self._config.method == AUTO else self._config.method, "")
        matrices = *split_first(found, tensors[found.first]), straight_down(found, tensors["down_proj"])
        biases = None
        if found.module.has_bias:
            biases = *split_first(found, tensors[f"{found.first}_bias"]), tensors["down_proj_bias"]
        wrapper.load_weights_from_tensors(*matrices, biases=biases)
        self._finish(wrapper, {name: tensor for name, tensor in tensors.items() if name.endswith("_bias")})
        self._tensors = dict.fromkeys(tensors)

    def _make_wrapper(self, method: str, path: str) -> KTMoEWrapper:
        found, config = self.found, self._config
        return KTMoEWrapper(
            layer_idx=found.layer_idx,
            num_experts=found.num_experts,
            num_experts_per_tok=found.top_k,
            hidden_size=found.hidden,
            moe_intermediate_size=found.intermediate,
            gpu_experts_mask=self._gpu_mask,
            cpuinfer_threads=config.threads,
            threadpool_count=config.subpools,
            weight_path=path,
            method=method,
            numa_nodes=config.numa_nodes,
            swiglu_limit=found.activation.limit,
            swiglu_alpha=found.activation.alpha,
            skip_gpu_experts=False,
            activation=found.activation.name,
            biases=found.module.has_bias,
        )

    def _finish(self, wrapper: KTMoEWrapper, biases: dict[str, torch.Tensor] | None) -> None:
        self._layer = KTLayer(wrapper, self._gpu_experts(wrapper, biases) if self.splits else None)

    def install(self, device: torch.device) -> None:
        """Gives the module its layer. Not before the load has ended: transformers makes buffers anew that it finds."""
        if self.splits:
            self.found.module.kt_gpu_experts = self._layer.on_gpu.to(device)
        self.found.module.kt_layer = self._layer

    def _gpu_experts(self, wrapper: KTMoEWrapper, biases: dict[str, torch.Tensor] | None) -> GpuExperts:
        """The experts of the mask, decoded: they are what the CPU would compute with."""
        chosen = [expert for expert, flag in enumerate(self._gpu_mask) if flag]
        decoded = zip(*(wrapper.moe.decode_expert(expert) for expert in chosen), strict=True)
        matrices = tuple(
            None if parts[0] is None else torch.stack([torch.from_numpy(part).bfloat16() for part in parts])
            for parts in decoded
        )
        vectors = None
        if biases:
            both = split_first(self.found, biases[f"{self.found.first}_bias"])
            vectors = tuple(vector[chosen].bfloat16() for vector in (*both, biases["down_proj_bias"]))
        return GpuExperts(self.found.module, self.found.activation, self._gpu_mask, matrices, vectors)


class Pack(ConversionOps):
    """Takes each finished parameter of experts, so that nothing is left to load."""

    def __init__(self, fillers: dict[str, Filler], fail: Callable[[Exception], None]):
        self._fillers, self._fail = fillers, fail  # by name of the module

    def convert(self, input_dict, missing_keys=None, **_):
        for full_name, tensors in input_dict.items():
            module, _, name = full_name.rpartition(".")
            try:
                self._fillers[module].take(name, tensors[0] if isinstance(tensors, list) else tensors)
            except (ValueError, TypeError, RuntimeError, MemoryError) as error:
                self._fail(error)
            self._fillers[module].found.drop([name])
            if missing_keys is not None:
                missing_keys.discard(full_name)
        return {}

"""The quantizer "kt": takes the experts out of transformers' hands while a model loads.

before   the model is on meta. Each module of experts gets a way (sources.py); those of our own loader lose their
         parameters, so that transformers does not read them.
load     transformers loads the rest, decoded where the checkpoint is quantised (decoding.py), and hands us what it
         merges (packing.py)
after    our loader fills the layers of its modules
"""

import logging
import re
from pathlib import Path

import torch
from torch import nn
from transformers.quantizers.base import HfQuantizer

import kt_kernel
from kt_kernel import runtime
from kt_kernel.hf import decoding
from kt_kernel.hf.config import AUTO, NAME, KTConfig
from kt_kernel.hf.experts import ExpertsModule, find_experts
from kt_kernel.hf.linear import preferred_format, replace_linears
from kt_kernel.hf.packing import Filler, Pack
from kt_kernel.hf.sources import Choice, KeyMap, Way, choose
from kt_kernel.weights.config import checkpoint_format_beside
from kt_kernel.weights.progress import Progress, Report
from kt_kernel.weights.tensor_files import TensorFiles

_LOG = logging.getLogger("kt_kernel.hf")


class KTQuantizer(HfQuantizer):
    requires_calibration = False
    quantization_config: KTConfig

    def __init__(self, quantization_config: KTConfig, **kwargs):
        super().__init__(quantization_config, **kwargs)
        self.pre_quantized = False  # until the headers say so
        self.choices: dict[str, Choice] = {}  # by name of the module
        self.where = Path()  # the checkpoint
        self.checkpoint_format: str | None = None
        self._fillers: dict[str, Filler] = {}
        self._aliases: dict[str, str] = {}  # modules that share the experts of others
        self._encoded: decoding.EncodedNames | None = None
        self._failure: Exception | None = None

    # Before

    def _process_model_before_weight_loading(self, model: nn.Module, checkpoint_files=None, **_):
        modules = {found.name: found for found in find_experts(model)}
        if not modules:
            raise ValueError(
                f"{type(model).__name__} has no experts that transformers would let others compute: load it without "
                "KTConfig"
            )
        keys = KeyMap(model)
        self._find_aliases(model, modules)
        folder = _folder(checkpoint_files)
        self._choose(modules, keys, folder)
        if folder is not None:
            self.where, self.checkpoint_format = folder, checkpoint_format_beside(folder)
            with TensorFiles(folder) as files:
                self._encoded = decoding.find_encoded(files, keys, self._names(Way.FILES))
            self.pre_quantized = bool(self._encoded.leaves)
        for name in self._names(Way.FILES):
            self._fillers[name].found.drop(self._fillers[name].dropped)
        for name in self._aliases:
            modules[name].drop(modules[name].parameters)
            for parameter in modules[name].parameters:
                del model.all_tied_weights_keys[f"{name}.{parameter}"]
        ignored = {rf"^{re.escape(name)}\." for name in (*self._names(Way.FILES), *self._aliases)}
        if self.pre_quantized:
            ignored.add(decoding.IGNORED)
        model._keys_to_ignore_on_load_unexpected = set(model._keys_to_ignore_on_load_unexpected or ()) | ignored
        return model

    def _find_aliases(self, model: nn.Module, modules: dict[str, ExpertsModule]) -> None:
        """Models that tie experts to those of another part: theirs is the layer of the others."""
        for target, source in model.all_tied_weights_keys.items():
            mine, theirs = (name.rpartition(".")[0] for name in (target, source))
            if mine in modules and modules[mine].refusal is None:
                self._aliases[mine] = theirs

    def _choose(self, modules: dict[str, ExpertsModule], keys: KeyMap, folder: Path | None) -> None:
        config, given = self.quantization_config, self.quantization_config.weight_path is not None
        owners = {name: found for name, found in modules.items() if name not in self._aliases}
        if given and len({found.layer_idx for found in owners.values()}) < len(owners):
            raise ValueError(
                f"weight_path {config.weight_path} has experts by layer, and this model has several with one number: "
                f"{', '.join(owners)}. Leave weight_path out"
            )
        path = Path(config.weight_path) if given else folder
        for index, (name, found) in enumerate(owners.items()):
            choice = self.choices[name] = choose(found, path, keys, given)
            mask = config.gpu_mask(index, len(owners), found.num_experts)
            self._fillers[name] = Filler(found, config, mask, path if choice.way is Way.FILES else None)
        for way, level in ((Way.TENSORS, logging.INFO), (Way.TRANSFORMERS, logging.WARNING)):
            names = self._names(way)
            if names:
                text = "experts of %s, and of %d more, go by way of %s: %s"
                _LOG.log(level, text, names[0], len(names) - 1, way.value, self.choices[names[0]].reason)

    def _names(self, way: Way) -> list[str]:
        return [name for name, choice in self.choices.items() if choice.way is way]

    # Load

    def param_needs_quantization(self, model: nn.Module, param_name: str, **_) -> bool:
        module, _, name = param_name.rpartition(".")
        choice = self.choices.get(module)
        return choice is not None and choice.way is Way.TENSORS and name in self._fillers[module].found.parameters

    def get_quantize_ops(self) -> Pack:
        return Pack(self._fillers, self.fail)

    def fail(self, error: Exception) -> None:
        """transformers would bury it in a report: the first one is raised when the load has ended."""
        self._failure = self._failure or error

    def param_element_size(self, model: nn.Module, param_name: str, param: torch.Tensor) -> float:
        """Experts take no memory of a GPU."""
        packed = self.param_needs_quantization(model, param_name)
        return 0 if packed else super().param_element_size(model, param_name, param)

    @property
    def serialized_names(self) -> dict[str, list[str]]:
        return {"weight": list(self._encoded.suffixes)} if self.pre_quantized else {}

    def get_load_operations(self) -> dict:
        return {"dequantize": decoding.Decode}

    def get_weight_conversions(self) -> list:
        return decoding.converters(self, self._encoded) if self.pre_quantized else []

    # After

    def _process_model_after_weight_loading(self, model: nn.Module, **_):
        if self._failure is not None:
            raise self._failure
        self._finish_tensors()
        self._fill_from_files()
        self._install(model)
        self._replace_linears(model)
        model.set_experts_implementation(NAME)
        self._fillers.clear()
        return model

    def _install(self, model: nn.Module) -> None:
        for name, filler in self._fillers.items():
            if self.choices[name].way is Way.TRANSFORMERS:
                continue
            device = _device_beside(model, name)
            filler.install(device)
            if filler.splits and device.type == "cpu":
                _LOG.warning("gpu_experts of %s are on the CPU until the model is moved to a GPU", name)
        for name, owner in self._aliases.items():
            model.get_submodule(name).kt_layer = model.get_submodule(owner).kt_layer

    def _replace_linears(self, model: nn.Module) -> None:
        config = self.quantization_config
        weight_format = preferred_format(kt_kernel.__cpu_variant__) if config.linears == AUTO else config.linears
        if weight_format is None or (config.linears == AUTO and model.device.type != "cpu"):
            return
        plan = runtime.plan_pool(
            config.threads, config.subpools, config.numa_nodes, beside_gpu=torch.cuda.is_available()
        )
        count = replace_linears(model, weight_format, runtime.runtime_for(plan))
        _LOG.info("%d linears are packed in %s", count, weight_format)

    def _finish_tensors(self) -> None:
        """A checkpoint that is quantised is decoded first, so its tensors are only there now."""
        for name in self._names(Way.TENSORS):
            filler = self._fillers[name]
            for parameter in filler.missing if self.pre_quantized else ():
                tensor = getattr(filler.found.module, parameter)
                if getattr(tensor, "_is_hf_initialized", False):  # loaded, not made up
                    filler.found.drop([parameter])
                    filler.take(parameter, tensor)
            if filler.missing:
                names = ", ".join(f"{name}.{parameter}" for parameter in filler.missing)
                raise ValueError(f"{self.where} has no weights for {names}; is the checkpoint complete?")

    def _fill_from_files(self) -> None:
        fillers = [self._fillers[name] for name in self._names(Way.FILES)]
        with Progress("experts", sum(filler.found.num_experts for filler in fillers)) as bar:
            for filler in fillers:
                filler.fill_from_files(_advancing(bar))

    # What a packed model is

    def is_serializable(self, *_) -> bool:
        raise ValueError(
            "the experts of this model are packed for this machine and cannot be saved: copy the folder of the "
            "checkpoint instead, or convert its experts with `kt quant`"
        )

    @property
    def is_trainable(self) -> bool:
        return False


def _advancing(bar: Progress) -> Report:
    """Counts the experts of one layer, of which a store is told again."""
    most = 0

    def report(done: int, _: int) -> None:
        nonlocal most
        if done > most:
            bar.advance(done - most)
            most = done

    return report


def _folder(checkpoint_files: list[str] | None) -> Path | None:
    """Of a checkpoint in safetensors; its only file, if others lie beside it."""
    files = [Path(file) for file in checkpoint_files or ()]
    if not files or any(file.suffix != ".safetensors" for file in files):
        return None
    return files[0] if len(files) == 1 and len(list(files[0].parent.glob("*.safetensors"))) > 1 else files[0].parent


def _device_beside(model: nn.Module, name: str) -> torch.device:
    """Where the router is, whose tokens come."""
    block = model.get_submodule(name.rpartition(".")[0])
    parameters = (parameter for parameter in block.parameters() if not parameter.is_meta)
    return next((parameter.device for parameter in parameters), model.device)

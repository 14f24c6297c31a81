"""Where SGLang is entered, by its own registry of hooks.

Every process gets the options. Processes that compute also get the method for layers, which acts only on layers that
SGLang itself would give to the CPU. What this SGLang lacks is told, and leaves SGLang as it is.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from kt_kernel.integrations.sglang import engine, options

ENGINE_MODULE = "sglang.srt.entrypoints.engine"


def register() -> None:
    if reason := engine.misfit(engine.NEEDED_FOR_OPTIONS):
        engine.log.warning(reason)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import ServerArgs

    if options.NAMES[0] in getattr(ServerArgs, "__annotations__", {}):
        engine.log.info(f"SGLang {engine.version()} has options of its own for experts on the CPU; nothing is added")
        return
    HookRegistry.register(f"{engine.ARGUMENTS}.add_cli_args", _add_cli_args, HookType.AFTER)
    HookRegistry.register(f"{engine.ARGUMENTS}.from_cli_args", _from_cli_args, HookType.AROUND)
    _take_engine_arguments(ServerArgs)
    if engine.computes():
        _register_method(HookRegistry, HookType)


def _register_method(registry: Any, kinds: Any) -> None:
    if reason := engine.misfit(engine.NEEDED):
        engine.log.warning(reason)
        return
    from sglang.srt.layers.moe.kt_ep_wrapper import KTEPWrapperMethod

    from kt_kernel.integrations.sglang.method import method_class

    layer = f"{engine.LAYER_MODULE}.FusedMoE"
    registry.register(f"{engine.METHOD_MODULE}.create_kt_config_from_server_args", _kt_config, kinds.AROUND)
    registry.register(f"{engine.METHOD_MODULE}.KTEPWrapperMethod", method_class(KTEPWrapperMethod), kinds.REPLACE)
    registry.register(f"{layer}._weight_loader_impl", _load_expert, kinds.AROUND)
    registry.register(f"{layer}.weight_loader_fused", _load_experts, kinds.AROUND)
    if not engine.missing(engine.NEEDED_TO_RECORD):
        _register_record(registry, kinds)


def _register_record(registry: Any, kinds: Any) -> None:
    from kt_kernel.integrations.sglang import record

    registry.register(f"{engine.RECORDER}.with_forward_pass", record.before_pass, kinds.BEFORE)
    registry.register(f"{engine.RECORDER}.start_record", record.after_start, kinds.AFTER)
    registry.register(f"{engine.RECORDER}.dump_record", record.after_dump, kinds.AFTER)


# Options


def _add_cli_args(result: None, parser: argparse.ArgumentParser) -> None:
    options.add_flags(parser)


def _from_cli_args(original: Callable, cls: type, arguments: argparse.Namespace) -> Any:
    try:
        found = _prepare(vars(arguments))
    except ValueError as error:
        sys.exit(f"error: {error}")
    return _with_options(original(cls, arguments), found)


def _take_engine_arguments(server_args_class: type) -> None:
    """sglang.Engine(kt_...=): it makes its record by this attribute, and loads plugins just before it does."""
    module = sys.modules.get(ENGINE_MODULE)
    made_by = getattr(getattr(module, "Engine", None), "server_args_class", None)
    if made_by is not server_args_class:
        return

    def make_record(**arguments: Any) -> Any:
        whole = {**_changeable(server_args_class), **arguments}
        found = _prepare(whole)
        taken = {name: value for name, value in whole.items() if name not in options.NAMES}
        return _with_options(server_args_class(**taken), found)

    module.Engine.server_args_class = staticmethod(make_record)


def _changeable(server_args_class: type) -> dict[str, object]:
    """Defaults of SGLang's options that we may have to change."""
    names = getattr(server_args_class, "__annotations__", {})
    defaults = {"disable_prefill_cuda_graph": False, "disable_shared_experts_fusion": False}
    return {name: value for name, value in defaults.items() if name in names}


def _prepare(values: dict[str, Any]) -> options.Options | None:
    """Our options out of all, which are changed where experts on the CPU need it; None without --kt-weight-path."""
    options.check_record(values)
    if values.get("kt_weight_path") is None:
        if unused := options.given(values):
            engine.log.warning(f"{', '.join(map(options.flag, unused))}: nothing without --kt-weight-path")
        return None
    found = options.options_from(values)
    for name, (value, why) in options.changes(found, values).items():
        engine.log.info(f"{options.flag(name)} is {value} with --kt-weight-path: {why}")
        values[name] = value
    return found


def _with_options(record: Any, found: options.Options | None) -> Any:
    if found is not None:
        if reason := engine.misfit(engine.NEEDED):
            engine.log.warning(reason)
        asked = options.flag("record_kt_gpu_expert_distribution")
        if found.record_kt_gpu_expert_distribution and (reason := engine.misfit(engine.NEEDED_TO_RECORD, asked)):
            engine.log.warning(reason)
        record._kt_options = found  # names with an underscore travel with the record, and are not printed with it
    return record


# Layers


def _kt_config(original: Callable, server_args: Any, layer_idx: int) -> Any:
    if server_args.kt_weight_path is None or engine.in_draft_model():
        return None
    from kt_kernel.integrations.sglang.plan import plan_for

    config = original(server_args, layer_idx)
    config.plan = plan_for(server_args)
    return config


def _load_expert(original: Callable, layer: Any, *args: Any, **named: Any) -> None:
    """An expert's tensor goes to its place on the GPU, or nowhere."""
    place = getattr(layer.quant_method, "load_place", None)
    if place is None:
        return original(layer, *args, **named)
    expert = named.pop("expert_id") if "expert_id" in named else args[4]
    if (at := place(expert)) < 0:
        return None
    return original(layer, *args[:4], **named, expert_id=at)


def _load_experts(original: Callable, layer: Any, param: Any, loaded_weight: Any, *args: Any, **named: Any) -> None:
    """All experts of a layer in one tensor."""
    residents = getattr(layer.quant_method, "residents", None)
    if residents is not None and loaded_weight.dim() and loaded_weight.shape[0] == residents.num_experts:
        loaded_weight = loaded_weight[residents.ids]
    return original(layer, param, loaded_weight, *args, **named)

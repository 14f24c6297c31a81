"""What the plugin uses of SGLang, and where versions of it differ.

It was tried with the versions of TRIED. Another version is used if all of NEEDED is there.
"""

import importlib
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

log = logging.getLogger("kt_kernel.sglang")

TRIED = ("0.5.17", "0.5.23")

METHOD_MODULE = "sglang.srt.layers.moe.kt_ep_wrapper"
LAYER_MODULE = "sglang.srt.layers.moe.fused_moe_triton.layer"
ARGUMENTS = "sglang.srt.server_args.ServerArgs"
RECORDER = "sglang.srt.eplb.expert_distribution._ExpertDistributionRecorderReal"

# Names that must exist: those that every process needs, and those of processes that compute.
NEEDED_FOR_OPTIONS = (
    "sglang.srt.plugins.hook_registry.HookRegistry.register",
    f"{ARGUMENTS}.add_cli_args",
    f"{ARGUMENTS}.from_cli_args",
)
NEEDED = (
    f"{METHOD_MODULE}.KTEPWrapperMethod.apply",
    f"{METHOD_MODULE}.KTEPWrapperMethod.create_weights",
    f"{METHOD_MODULE}.KTEPWrapperMethod.create_moe_runner",
    f"{METHOD_MODULE}.KTEPWrapperMethod.process_weights_after_loading",
    f"{METHOD_MODULE}.create_kt_config_from_server_args",
    f"{LAYER_MODULE}.FusedMoE._weight_loader_impl",
    f"{LAYER_MODULE}.FusedMoE.weight_loader_fused",
    "sglang.srt.layers.moe.token_dispatcher.StandardCombineInput",
    "sglang.srt.runtime_context.get_parallel",
)
NEEDED_TO_RECORD = (
    f"{RECORDER}.recording",
    f"{RECORDER}.with_forward_pass",
    f"{RECORDER}.start_record",
    f"{RECORDER}.dump_record",
    "sglang.srt.environ.envs.SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR",
)


def version() -> str:
    return str(getattr(importlib.import_module("sglang"), "__version__", "unknown"))


def missing(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if not _exists(name)]


def _exists(name: str) -> bool:
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def misfit(names: tuple[str, ...], purpose: str = "its options") -> str | None:
    """Why this SGLang cannot be used, or None."""
    absent = missing(names)
    if not absent:
        return None
    return (
        f"SGLang {version()} lacks {', '.join(absent)}, which kt-kernel needs for {purpose}; it was tried with "
        f"{' and '.join(TRIED)}. SGLang's own --kt options work as before"
    )


def computes() -> bool:
    """Whether this process may hold a model: SGLang's servers import the scheduler only to start it elsewhere."""
    return "sglang.srt.managers.scheduler" in sys.modules or METHOD_MODULE in sys.modules


def text_config(server_args: Any) -> dict:
    """config.json of the model, what concerns text, as SGLang read it."""
    if hasattr(server_args, "get_model_config"):  # 0.5.17
        config = server_args.get_model_config()
    else:
        from sglang.srt.arg_groups.overrides import model_config_of

        config = model_config_of(server_args)
    found = getattr(config, "hf_text_config", None) or config.hf_config
    return found.to_dict() if hasattr(found, "to_dict") else dict(vars(found))


def in_draft_model() -> bool:
    """Whether the model that is being built is the small one of speculative decoding, which stays on the GPU."""
    from sglang.srt.runtime_context import get_flags

    return bool(getattr(getattr(get_flags(), "moe", None), "in_speculative_scope", False))


def tensor_group() -> tuple[int, int]:
    """(rank, size) of tensor parallelism."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(parallel.tp_rank), int(parallel.tp_size)


def _group() -> Any:
    try:
        from sglang.srt.distributed import get_tp_group  # 0.5.17

        return get_tp_group()
    except ImportError:
        from sglang.srt.runtime_context import get_parallel

        return get_parallel().tp_group


def broadcast_from_first(tensor: "torch.Tensor") -> None:
    """Every rank gets what rank 0 has: CPU tensors by the CPU's group, others in stream order by the device's."""
    import torch.distributed as dist

    group = _group()
    dist.broadcast(tensor, src=group.ranks[0], group=group.cpu_group if tensor.is_cpu else group.device_group)


def gather_objects(value: object) -> list:
    """What each rank has, in the order of ranks."""
    import torch.distributed as dist

    group = _group()
    found = [None] * len(group.ranks)
    dist.all_gather_object(found, value, group=group.cpu_group)
    return found


def recorder_passes(server_args: Any) -> int:
    """How many passes SGLang's recorder of expert distributions keeps; below 0: all."""
    return getattr(server_args, "expert_distribution_recorder_buffer_size", None) or 1000  # SGLang's own default


def recorder_folder() -> Path:
    """Where SGLang's recorder writes."""
    from sglang.srt.environ import envs

    return Path(envs.SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR.get())


def logical_ids(layer_idx: int, num_experts: int) -> "torch.Tensor":
    """Logical expert of each place, int64 [E] on the CPU."""
    import torch

    try:
        from sglang.srt.eplb.expert_location_dispatch import get_global_expert_location_metadata
    except ImportError:
        metadata = None
    else:
        metadata = get_global_expert_location_metadata()
    if metadata is None:
        return torch.arange(num_experts, device="cpu")
    return metadata.physical_to_logical_map_cpu[layer_idx].contiguous()


def model_scales_output() -> bool:
    """Whether the model that makes this layer multiplies its output by routed_scaling_factor itself.

    Models that do so for layers with experts on the CPU import KTEPWrapperMethod to ask; for the others the factor is
    applied inside of the layer. Called while the layer is made, so the model's module is on the stack.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("sglang.srt.models."):
            return "KTEPWrapperMethod" in frame.f_globals
        frame = frame.f_back
    return True

"""Options that the plugin adds to SGLang's, on the command line and as arguments of sglang.Engine."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from kt_kernel.placement import STRATEGIES

TRIVIAL = "trivial"  # SGLang's word for: expert e is at place e


@dataclass(frozen=True)
class Options:
    """What was asked for; `statistics` is what --init-expert-location named."""

    kt_gpu_prefill_token_threshold: int = 0
    kt_enable_dynamic_expert_update: bool = False
    kt_expert_placement_strategy: str = "uniform"
    kt_gpu_experts_ratio: float | None = None
    kt_numa_nodes: tuple[int, ...] | None = None
    record_kt_gpu_expert_distribution: bool = False
    statistics: str | None = None


DEFAULTS = Options()
NAMES = tuple(field.name for field in fields(Options) if field.name != "statistics")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _ratio(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not in 0..1")
    return value


def _tokens(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0; 0 turns it off")
    return value


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("kt-kernel", "with --kt-weight-path: experts on the CPU")
    group.add_argument(
        flag("kt_gpu_prefill_token_threshold"),
        type=_tokens,
        default=DEFAULTS.kt_gpu_prefill_token_threshold,
        help="Calls of at least this many tokens compute all experts on the GPU, layer by layer, with weights that the "
        "CPU sends. Needs GPU memory for one layer. 0 turns it off.",
    )
    group.add_argument(
        flag("kt_enable_dynamic_expert_update"),
        action="store_true",
        help="After such a call, the experts that it used most are those on the GPU.",
    )
    group.add_argument(
        flag("kt_expert_placement_strategy"),
        choices=STRATEGIES,
        default=DEFAULTS.kt_expert_placement_strategy,
        help="Which experts are on the GPU at the start. frequency: by the counts in the .pt file of "
        "--init-expert-location.",
    )
    group.add_argument(
        flag("kt_gpu_experts_ratio"),
        type=_ratio,
        default=None,
        help="Share of all experts that are on the GPU, 0 to 1; decides before --kt-num-gpu-experts.",
    )
    group.add_argument(
        flag("kt_numa_nodes"),
        type=int,
        nargs="+",
        default=None,
        help="NUMA node of each of --kt-threadpool-count pools.",
    )
    group.add_argument(
        flag("record_kt_gpu_expert_distribution"),
        action="store_true",
        help="Each dump of --expert-distribution-recorder-mode also writes which experts were on the GPU in each pass.",
    )


def given(values: Mapping[str, object]) -> list[str]:
    """Names of our options in `values` that differ from their defaults."""
    return [name for name in NAMES if values.get(name) not in (None, getattr(DEFAULTS, name), 0)]


def check_record(values: Mapping[str, object]) -> None:
    """A ValueError where the record of experts on the GPU was asked for and could never be written."""
    name = "record_kt_gpu_expert_distribution"
    if not values.get(name):
        return
    if values.get("kt_weight_path") is None:
        raise ValueError(f"{flag(name)} needs --kt-weight-path: without it all experts are on the GPU")
    if values.get("expert_distribution_recorder_mode") is None:
        raise ValueError(
            f"{flag(name)} adds a file to the dumps of SGLang's recorder: it needs --expert-distribution-recorder-mode "
            "stat, per_pass or per_token"
        )


def options_from(values: Mapping[str, object]) -> Options:
    """Checks; a ValueError names the option and the way out."""
    taken = {name: values[name] for name in NAMES if values.get(name) is not None}
    if nodes := taken.get("kt_numa_nodes"):
        taken["kt_numa_nodes"] = tuple(nodes)
        pools = values.get("kt_threadpool_count")
        if pools is not None and len(nodes) != pools:
            raise ValueError(f"{flag('kt_numa_nodes')} names {len(nodes)} nodes and --kt-threadpool-count is {pools}")
    strategy = taken.get("kt_expert_placement_strategy", DEFAULTS.kt_expert_placement_strategy)
    if strategy not in STRATEGIES:
        raise ValueError(f"{flag('kt_expert_placement_strategy')} {strategy}: choose {', '.join(STRATEGIES)}")
    ratio = taken.get("kt_gpu_experts_ratio")
    if ratio is not None and not 0 <= ratio <= 1:
        raise ValueError(f"{flag('kt_gpu_experts_ratio')} {ratio} is not in 0..1")
    if taken.get("kt_gpu_prefill_token_threshold", 0) < 0:
        raise ValueError(f"{flag('kt_gpu_prefill_token_threshold')} must be 0 (off) or more")
    if taken.get("kt_enable_dynamic_expert_update") and not taken.get("kt_gpu_prefill_token_threshold"):
        raise ValueError(
            f"{flag('kt_enable_dynamic_expert_update')} moves experts after a prefill on the GPU: it needs "
            f"{flag('kt_gpu_prefill_token_threshold')}"
        )
    statistics = values.get("init_expert_location")
    statistics = None if statistics in (None, TRIVIAL) else str(statistics)
    if strategy == "frequency" and statistics is not None and not os.path.isfile(statistics):
        raise ValueError(f"--init-expert-location {statistics}: no such file; frequency reads counts from it")
    return Options(**taken, statistics=statistics)


def changes(options: Options, values: Mapping[str, object]) -> dict[str, tuple[object, str]]:
    """Options of SGLang that must be otherwise with experts on the CPU: name to (value, why)."""
    wanted = {
        "disable_prefill_cuda_graph": (True, "prefill graphs hold no work of the CPU"),
        "disable_shared_experts_fusion": (True, "the CPU has the routed experts only"),
    }
    if options.kt_gpu_experts_ratio is not None:  # kt run gives the number too
        wanted["kt_num_gpu_experts"] = (None, f"{flag('kt_gpu_experts_ratio')} says how many")
    if options.statistics is not None:
        used = options.kt_expert_placement_strategy == "frequency"
        why = "its counts place experts, whose numbers stay" if used else "only the strategy frequency reads counts"
        wanted["init_expert_location"] = (TRIVIAL, why)
    return {name: change for name, change in wanted.items() if name in values and values[name] != change[0]}

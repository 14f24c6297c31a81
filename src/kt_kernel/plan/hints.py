"""What would have to change: for a model that does not fit, and for one that could be faster."""

from kt_kernel.cli.language import t
from kt_kernel.plan import choices, sizes
from kt_kernel.plan.choices import Wanted
from kt_kernel.plan.plan import DISK, GPU_MEMORY, MEMORY, Alternative, Need, Plan

# A method that loses something must be this much faster to be worth a line.
_WORTH = 1.25


def hints(plan: Plan, wanted: Wanted) -> list[str]:
    found = []
    for need in plan.chosen.needs:
        if not need.fits:
            found += _OF_NEED[need.what](plan, need, wanted)
    if plan.chosen.fits:
        found += _faster(plan)
    return found


def _missing(need: Need) -> str:
    return f"{(need.needed_bytes - need.available_bytes) / 1e9:.1f}"


def _memory(plan: Plan, need: Need, wanted: Wanted) -> list[str]:
    found = [t("{gb} GB of memory are missing", gb=_missing(need))]
    if fitting := [other for other in plan.alternatives if other.fits]:
        best = fitting[0]
        found.append(t("it fits with --method {method}{speed}", method=best.method, speed=_speed(best)))
    facts = plan.chosen.model.facts
    if plan.chosen.engine == choices.EMBEDDED and (keys := sizes.kv_token_bytes(facts)):
        tokens = int(plan.chosen.choices["context"].value) - -(-(need.needed_bytes - need.available_bytes) // keys)
        if tokens >= 256:
            found.append(t("it fits with --context {tokens}", tokens=tokens // 256 * 256))
    if plan.chosen.gpu is not None and plan.chosen.gpu.gpu_experts:
        expert = sizes.expert_bytes(facts, choices.weight_format(plan.chosen.method)) / facts.experts
        saved = plan.chosen.gpu.gpu_experts * expert
        line = t("KT_KERNEL_SKIP_GPU_EXPERTS=1 keeps {gb} GB of experts that are on the GPU out of it", gb=_gb(saved))
        found.append(line)
    if len(found) == 1:
        gb = _gb(min([need.needed_bytes, *(other.memory_bytes for other in plan.alternatives)]))
        line = t("the smallest method needs {gb} GB: take a machine with more memory, or a smaller model", gb=gb)
        found.append(line)
    return found


def _gpu_memory(plan: Plan, need: Need, wanted: Wanted) -> list[str]:
    found = [t("{gb} GB of memory are missing on each GPU", gb=_missing(need))]
    over = need.needed_bytes - need.available_bytes
    facts, gpu = plan.chosen.model.facts, plan.chosen.gpu
    keys = sizes.kv_token_bytes(facts) / (1 if facts.mla else min(gpu.count, facts.kv_heads))
    tokens = int(gpu.tokens - over / keys)
    if tokens >= 1024:
        found.append(t("it fits with --max-total-tokens {tokens}", tokens=tokens // 1024 * 1024))
    if wanted.gpu_experts:
        found.append(t("it may fit with fewer --gpu-experts; without the option as many as fit are taken"))
    if len(found) == 1:
        found.append(t("the part of the model beside its experts is too large: --engine embedded needs no GPU"))
    return found


def _disk(plan: Plan, need: Need, wanted: Wanted) -> list[str]:
    line = t("{gb} GB are missing on the disk: 'kt config set paths.models FOLDER' names another", gb=_missing(need))
    return [line]


_OF_NEED = {MEMORY: _memory, GPU_MEMORY: _gpu_memory, DISK: _disk}


def _faster(plan: Plan) -> list[str]:
    found = []
    for other in plan.alternatives:
        if other.fits and other.decode and other.decode.tokens_per_s > _WORTH * plan.decode.tokens_per_s:
            line = t(
                "--method {method} would decode {times} times as fast",
                method=other.method,
                times=f"{other.decode.tokens_per_s / plan.decode.tokens_per_s:.1f}",
            )
            found.append(line)
    if plan.chosen.gpu is not None and plan.chosen.gpu.gpu_experts < plan.chosen.model.facts.experts:
        facts = plan.chosen.model.facts
        each = facts.moe_layers * 3 * facts.hidden * facts.moe_intermediate * sizes.bytes_per_weight(facts.encoding)
        line = t(
            "each further expert of every layer on the GPU takes {gb} GB there and {share} % off the CPU's work",
            gb=f"{each / plan.chosen.gpu.count / 1e9:.2f}",
            share=f"{100 / facts.experts:.1f}",
        )
        found.append(line)
    return found


def _speed(other: Alternative) -> str:
    if other.decode is None:
        return ""
    return t(", at {rate} tokens/s", rate=f"{other.decode.tokens_per_s:.1f}")


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f}"

"""How a plan is printed, and what --json has of it."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from kt_kernel.cli import printing
from kt_kernel.cli.language import t
from kt_kernel.machine.probe import QUIET
from kt_kernel.plan.hints import hints

if TYPE_CHECKING:
    from kt_kernel.machine.facts import Machine
    from kt_kernel.plan.choices import Choice, Wanted
    from kt_kernel.plan.plan import Chosen, Need, Plan
    from kt_kernel.plan.predict import Prediction

# What concerns experts that the CPU computes.
_OF_THE_CPU = ("method", "threads", "numa nodes")


def show(plan: "Plan", machine: "Machine", wanted: "Wanted") -> None:
    facts = plan.chosen.model.facts
    print(
        t(
            "{name}: {layers} layers, {experts} experts of which a token takes {top_k}, {encoding} files",
            name=plan.chosen.model.name,
            layers=facts.layers,
            experts=facts.experts,
            top_k=facts.top_k,
            encoding=facts.encoding,
        )
    )
    rows = [(t("machine"), _machine(machine))]
    unused = _OF_THE_CPU if plan.chosen.all_on_gpu else ()
    shown = [choice for choice in plan.chosen.choices.values() if choice.name not in unused]
    rows += [(name_of(choice.name), choice_line(choice)) for choice in shown]
    rows += [(name_of(need.what), _need(need)) for need in plan.chosen.needs]
    rows += [
        (t("load"), _load(plan)),
        (t("decode"), promise(plan.decode)),
        (t("prefill"), promise(plan.prefill)),
    ]
    printing.facts(rows)
    if plan.alternatives:
        printing.table(
            [t("other methods"), t("memory GB"), t("fits"), t("decode tokens/s"), t("prefill tokens/s")],
            [
                (
                    other.method,
                    round(other.memory_bytes / 1e9, 1),
                    t("yes") if other.fits else t("no"),
                    _rate(other.decode),
                    _rate(other.prefill),
                )
                for other in plan.alternatives
            ],
        )
    for line in hints(plan, wanted):
        print(f"  * {line}")
    if line := busy_note(plan):
        printing.note("plan", line)


def busy_note(plan: "Plan") -> str | None:
    if plan.busy <= QUIET:
        return None
    busy = f"{100 * plan.busy:.0f}"
    return t("others used {busy} % of the CPUs while this was measured; 'kt plan --fresh' measures again", busy=busy)


def promise(found: "Prediction") -> str:
    """Tokens per second, and what a token's time is made of, largest part first."""
    each = {name: 1e3 * seconds / found.tokens for name, seconds in found.parts.items()}
    parts = sorted(each.items(), key=lambda part: -part[1])
    least = 0.01 * sum(each.values())
    shown = ", ".join(f"{name_of(name)} {printing.three_digits(ms)}" for name, ms in parts if ms >= least)
    return t("{rate} tokens/s (ms of a token: {parts})", rate=printing.three_digits(found.tokens_per_s), parts=shown)


def as_dict(plan: "Plan", machine: "Machine", wanted: "Wanted") -> dict:
    chosen = plan.chosen
    return {
        "model": {"name": chosen.model.name, "folder": chosen.model.folder, **asdict(chosen.model.facts)},
        "machine": {
            "cpu": machine.cpu,
            "variant": machine.variant,
            "cores": machine.cores,
            "memory_bytes": machine.memory_bytes,
            "available_bytes": machine.available_bytes,
            "gpus": [gpu.name for gpu in machine.gpus],
        },
        "fits": chosen.fits,
        "choices": as_choices(chosen),
        "needs": [{**asdict(need), "fits": need.fits} for need in chosen.needs],
        "token_bytes": plan.token_bytes,
        "decode": _prediction(plan.decode),
        "prefill": _prediction(plan.prefill),
        "load_seconds": {"disk": plan.load_disk_s, "memory": plan.load_memory_s},
        "alternatives": [
            {
                "method": other.method,
                "memory_bytes": other.memory_bytes,
                "fits": other.fits,
                "decode": _prediction(other.decode),
                "prefill": _prediction(other.prefill),
            }
            for other in plan.alternatives
        ],
        "hints": hints(plan, wanted),
        "busy": plan.busy,
    }


def as_choices(chosen: "Chosen") -> dict:
    return {name: {"value": choice.value, "reason": choice.reason} for name, choice in chosen.choices.items()}


def choice_line(choice: "Choice") -> str:
    """The value and its reason; the reason alone where nobody decided."""
    if choice.value is None:
        return choice.reason
    value = ", ".join(map(str, choice.value)) if isinstance(choice.value, tuple) else choice.value
    return f"{value} ({choice.reason})"


def _machine(machine: "Machine") -> str:
    gpus = ", ".join(gpu.name for gpu in machine.gpus) or t("no GPU")
    return t(
        "{cpu}, {cores} cores ({variant}), {free} of {all} GB of memory free, {gpus}",
        cpu=machine.cpu,
        cores=machine.cores,
        variant=machine.variant,
        free=f"{machine.available_bytes / 1e9:.1f}",
        all=f"{machine.memory_bytes / 1e9:.1f}",
        gpus=gpus,
    )


def _need(need: "Need") -> str:
    needed, available = f"{need.needed_bytes / 1e9:.1f}", f"{need.available_bytes / 1e9:.1f}"
    if need.fits:
        return t("{needed} GB of {available}", needed=needed, available=available)
    return t("{needed} GB, but there are {available}: it does not fit", needed=needed, available=available)


def _load(plan: "Plan") -> str:
    memory = f"{plan.load_memory_s:.0f}"
    if plan.load_disk_s is None:
        return t("{memory} s from memory", memory=memory)
    return t("{disk} s from the disk, {memory} s from memory", disk=f"{plan.load_disk_s:.0f}", memory=memory)


def name_of(name: str) -> str:
    return {
        "engine": t("engine"),
        "method": t("method"),
        "threads": t("threads"),
        "context": t("context"),
        "slots": t("slots"),
        "gpu experts": t("GPU experts"),
        "numa nodes": t("NUMA nodes"),
        "memory": t("memory"),
        "GPU memory": t("GPU memory"),
        "disk": t("disk"),
        "experts": t("experts"),
        "linears": t("linears"),
        "barriers": t("barriers and routing"),
        "operations": t("norms and routing"),
        "launches": t("launches"),
        "scheduling": t("scheduling"),
        "attention": t("attention"),
        "sampling": t("sampling"),
        "head": t("head"),
    }[name]


def _prediction(found: "Prediction | None") -> dict | None:
    if found is None:
        return None
    return {"tokens_per_s": found.tokens_per_s, "tokens": found.tokens, "seconds": found.parts}


def _rate(found: "Prediction | None") -> float | None:
    return None if found is None else float(f"{found.tokens_per_s:.3g}")

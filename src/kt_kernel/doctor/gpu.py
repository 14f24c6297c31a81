"""Checks of GPUs."""

from kt_kernel.cli.language import t
from kt_kernel.doctor.facts import Facts
from kt_kernel.doctor.finding import Finding, Status
from kt_kernel.doctor.packages import order

# CUDA -> the oldest driver that runs it (release notes of the CUDA toolkit).
_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
_TAKEN_SHARE = 0.2


def gpus(facts: Facts) -> Finding:
    found, title = facts.machine.gpus, t("GPUs")
    if not found:
        if facts.read("/proc/driver/nvidia/version"):
            return Finding(
                "gpus",
                title,
                t("a driver is loaded, but nvidia-smi shows no GPU"),
                Status.WARNING,
                t("everything runs on the CPU"),
                "docker run --gpus all ..." if facts.in_container else "nvidia-smi",
            )
        return Finding("gpus", title, t("none: everything runs on the CPU"))
    total = sum(gpu.memory_bytes for gpu in found)
    free = sum(gpu.free_bytes for gpu in found)
    names = ", ".join(f"{sum(gpu.name == name for gpu in found)} x {name}" for name in {gpu.name: 0 for gpu in found})
    value = t("{names}: {free} of {total} GB free", names=names, free=f"{free / 1e9:.0f}", total=f"{total / 1e9:.0f}")
    details = tuple(
        t(
            "GPU {index}: {free} GB free, driver {driver}",
            index=g.index,
            free=f"{g.free_bytes / 1e9:.1f}",
            driver=g.driver,
        )
        for g in found
    )
    if free >= (1 - _TAKEN_SHARE) * total:
        return Finding("gpus", title, value, details=details)
    return Finding(
        "gpus",
        title,
        value,
        Status.WARNING,
        t("{taken} GB that other processes hold", taken=f"{(total - free) / 1e9:.0f}"),
        "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv",
        details,
    )


def driver(facts: Facts) -> Finding | None:
    """Whether torch can use the GPUs that are there."""
    if not facts.machine.gpus:
        return None
    there, title = facts.machine.gpus[0].driver, "CUDA"
    if facts.torch_cuda is None:
        return Finding(
            "cuda",
            title,
            t("driver {driver}; this torch is built for the CPU", driver=there),
            Status.WARNING,
            t("no GPU can be used"),
            "pip install --force-reinstall torch",
        )
    least = _DRIVERS.get(order(facts.torch_cuda)[0], "")
    value = t("driver {driver}, torch built for CUDA {cuda}", driver=there, cuda=facts.torch_cuda)
    if least and order(there) < order(least):
        return Finding(
            "cuda",
            title,
            value,
            Status.ERROR,
            t("no GPU can be used: CUDA {cuda} needs driver {least} or newer", cuda=facts.torch_cuda, least=least),
            t("install driver {least} or newer, or a torch for an older CUDA", least=least),
        )
    return Finding("cuda", title, value)

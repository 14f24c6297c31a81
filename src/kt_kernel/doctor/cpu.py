"""Checks of the processor: what computes, and how much of it this process gets."""

import re

from kt_kernel.cli.language import t
from kt_kernel.doctor.facts import Facts
from kt_kernel.doctor.finding import Finding, Status

# Of a core of a server in a cycle, on int8; a multiply-add is 2.
_OPERATIONS = {
    "amx": 2048,
    "avx512_bf16": 256,
    "avx512_vbmi": 256,
    "avx512_vnni": 256,
    "avx512_base": 128,
    "avx2": 64,
}
_BUSY = 0.05  # CPU time of others that nobody notices
# With these drivers "powersave" follows the load, and the preference decides.
_OWN_GOVERNORS = ("intel_pstate", "amd-pstate-epp", "amd-pstate")
_SAVING = ("power", "balance_power")


def processor(facts: Facts) -> Finding:
    machine = facts.machine
    value = t(
        "{name} (sockets: {packages}, cores: {cores}, CPUs: {cpus})",
        name=machine.cpu,
        packages=machine.packages,
        cores=machine.cores,
        cpus=machine.cpus,
    )
    return Finding("cpu", t("CPU"), value)


def instruction_set(facts: Facts) -> Finding:
    machine = facts.machine
    title, name = t("Instruction set"), "instruction_set"
    details = tuple(f"{variant.name}: {variant.reason}" for variant in machine.refused)
    if facts.emulated:
        return Finding(
            name,
            title,
            t("{variant}: emulated, no instruction set of this CPU is used", variant=machine.variant),
            Status.ERROR,
            t("10 to 100 times slower than vector instructions"),
            "unset KT_KERNEL_CPU_VARIANT" if facts.forced_variant else t("a CPU with AVX2 is needed"),
            details,
        )
    if facts.forced_variant and machine.variant != facts.best_variant:
        return Finding(
            name,
            title,
            t("{variant}, although {best} runs here", variant=machine.variant, best=facts.best_variant),
            Status.WARNING,
            _slower(machine.variant, facts.best_variant),
            "unset KT_KERNEL_CPU_VARIANT",
            details,
        )
    if machine.variant != facts.best_variant:
        return Finding(
            name,
            title,
            t("{variant}: the system denied the registers of {best}", variant=machine.variant, best=facts.best_variant),
            Status.WARNING,
            _slower(machine.variant, facts.best_variant),
            "docker run --security-opt seccomp=unconfined ..." if facts.in_container else t("Linux 5.16 or newer"),
            details,
        )
    if machine.variant == "avx2":
        return Finding(
            name,
            title,
            t("avx2: this CPU has no AVX-512 and no AMX"),
            Status.WARNING,
            _slower(machine.variant, "avx512_vnni"),
            "",
            details,
        )
    return Finding(name, title, machine.variant, details=details)


def _slower(variant: str, best: str) -> str:
    return t(
        "prompts: a core does {now} operations on int8 a cycle, with {best} {then}; answers lose little",
        now=_OPERATIONS[variant],
        best=best,
        then=_OPERATIONS[best],
    )


def hidden_cores(facts: Facts) -> Finding:
    """By an affinity mask or a cpuset."""
    online = count_list(facts.read("/sys/devices/system/cpu/online"))
    usable = facts.machine.cpus
    title = t("Usable CPUs")
    if usable >= online:
        return Finding("cpus", title, t("{usable} of {online}", usable=usable, online=max(online, usable)))
    every = facts.read("/sys/devices/system/cpu/online")
    narrowed = _is_cpuset(facts, online)
    fix = f"taskset -c {every} kt run ..."
    if narrowed:
        fix = f"docker update --cpuset-cpus {every} CONTAINER" if facts.in_container else _SYSTEMD.format(every)
    return Finding(
        "cpus",
        title,
        t("{usable} of {online}: a cpuset hides the others", usable=usable, online=online)
        if narrowed
        else t("{usable} of {online}: an affinity mask hides the others", usable=usable, online=online),
        Status.WARNING,
        t("{share} of the machine's CPUs do nothing", share=f"{1 - usable / online:.0%}"),
        fix,
    )


_SYSTEMD = "systemctl set-property --runtime UNIT AllowedCPUs={}"


def _is_cpuset(facts: Facts, online: int) -> bool:
    """Whether the cgroup of this process has fewer CPUs than the machine."""
    for line in facts.read("/proc/self/cgroup").splitlines() or ["0::/"]:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and "cpuset" not in controllers.split(","):
            continue
        base = "/sys/fs/cgroup" + ("/cpuset" if controllers else "")
        for folder in (base + path.rstrip("/"), base):
            for file in ("cpuset.cpus.effective", "cpuset.effective_cpus"):
                if text := facts.read(f"{folder}/{file}"):
                    return count_list(text) < online
    return False


def quota(facts: Facts) -> Finding | None:
    machine = facts.machine
    title = t("CPU quota")
    if not machine.cpu_quota:
        return Finding("quota", title, t("none"))
    value = t("time of {quota} CPUs for {cores} cores", quota=f"{machine.cpu_quota:g}", cores=machine.cores)
    if machine.cpu_quota >= machine.cores:
        return Finding("quota", title, value)
    fix = f"docker update --cpus {machine.cores} CONTAINER"
    if not facts.in_container:
        fix = f"systemctl set-property --runtime UNIT CPUQuota={100 * machine.cores}%"
    return Finding(
        "quota",
        title,
        value,
        Status.WARNING,
        t("{share} of the cores' time; threads are stopped in the middle of a step", share=f"{_lost(machine):.0%}"),
        fix,
    )


def _lost(machine) -> float:
    return 1 - machine.cpu_quota / machine.cores


def siblings(facts: Facts) -> Finding:
    """SMT: threads beyond the cores share one."""
    machine, title = facts.machine, t("Threads")
    if facts.cpu_threads is not None and facts.cpu_threads > machine.cores:
        return Finding(
            "threads",
            title,
            t(
                "inference.cpu_threads is {threads}, there are {cores} cores",
                threads=facts.cpu_threads,
                cores=machine.cores,
            ),
            Status.WARNING,
            t("threads that share a core wait for each other in every step; one for each core reads as fast"),
            f"kt config set inference.cpu_threads {machine.threads}",
        )
    value = t("{threads}, one for each core", threads=machine.threads)
    if machine.siblings:
        value = t(
            "{threads}; {siblings} SMT siblings are left alone", threads=machine.threads, siblings=machine.siblings
        )
    return Finding("threads", title, value)


def governor(facts: Facts) -> Finding | None:
    """None where the system does not tell, as in most virtual machines."""
    saving, known = [], []
    for cpu in (cpu for node in facts.machine.nodes for cpu in node.cpus):
        folder = f"/sys/devices/system/cpu/cpu{cpu}/cpufreq"
        name, driver = facts.read(f"{folder}/scaling_governor"), facts.read(f"{folder}/scaling_driver")
        if not name:
            continue
        preference = facts.read(f"{folder}/energy_performance_preference")
        own = driver in _OWN_GOVERNORS
        known.append(f"{name} ({preference})" if own and preference else name)
        if preference in _SAVING if own else name in ("powersave", "conservative"):
            saving.append(known[-1])
    if not known:
        return None
    title = t("Clock governor")
    if not saving:
        return Finding("governor", title, ", ".join(dict.fromkeys(known)))
    return Finding(
        "governor",
        title,
        t("{governor} on {count} of {cpus} CPUs", governor=saving[0], count=len(saving), cpus=len(known)),
        Status.WARNING,
        _clock_cost(facts),
        "sudo cpupower frequency-set -g performance",
    )


def _clock_cost(facts: Facts) -> str:
    folder = f"/sys/devices/system/cpu/cpu{facts.machine.nodes[0].cpus[0]}/cpufreq"
    now, most = (facts.read(f"{folder}/{name}") for name in ("scaling_cur_freq", "cpuinfo_max_freq"))
    if now.isdecimal() and most.isdecimal() and int(most):
        return t("clocks stay low: {now} of {most} GHz now", now=f"{int(now) / 1e6:.1f}", most=f"{int(most) / 1e6:.1f}")
    return t("clocks stay low")


def load(facts: Facts) -> Finding | None:
    if facts.rates is None:
        return None
    share, title = facts.rates.busy_share, t("Other processes")
    value = t("{share} of the CPU time", share=f"{share:.0%}")
    if share <= _BUSY:
        return Finding("load", title, value)
    return Finding(
        "load",
        title,
        value,
        Status.WARNING,
        t("a step ends with its slowest thread: one busy core slows down all"),
        "top -o %CPU",
    )


def count_list(text: str) -> int:
    """CPUs of a list as the kernel writes it: 0-3,8."""
    total = 0
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        total += int(last or first) - int(first) + 1
    return total

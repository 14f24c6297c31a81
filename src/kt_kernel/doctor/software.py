"""Checks of what is installed."""

import kt_kernel
from kt_kernel import _core
from kt_kernel.cli.language import t
from kt_kernel.doctor.facts import Facts
from kt_kernel.doctor.finding import Finding, Status
from kt_kernel.doctor.packages import PACKAGES, Package, order

_LEAST_PYTHON = (3, 10)


def python(facts: Facts) -> Finding:
    value = ".".join(map(str, facts.python))
    if facts.python >= _LEAST_PYTHON:
        return Finding("python", "Python", value)
    return Finding(
        "python",
        "Python",
        value,
        Status.ERROR,
        t("kt-kernel needs 3.10 or newer"),
        "python3.12 -m venv ~/kt && ~/kt/bin/pip install kt-kernel",
    )


def environment(facts: Facts) -> Finding:
    title = t("Environment")
    if facts.in_environment:
        return Finding("environment", title, t("container") if facts.in_container else t("of its own"))
    return Finding(
        "environment",
        title,
        t("the Python of the system"),
        Status.WARNING,
        t("other programs' packages and ours change each other's versions"),
        "python3 -m venv ~/kt && ~/kt/bin/pip install kt-kernel",
    )


def kernel(facts: Facts) -> Finding:
    value = f"{kt_kernel.__version__} ({facts.machine.variant})"
    return Finding("kt_kernel", "kt-kernel", value, details=(str(_core.__file__),))


def versions(facts: Facts) -> list[Finding]:
    """One finding for each package of the table that is installed, or has to be."""
    return [finding for package in PACKAGES if (finding := version(facts, package)) is not None]


def version(facts: Facts, package: Package) -> Finding | None:
    name = package.name
    there = facts.installed.get(name)
    if there is None:
        if package.needed_by:
            return None
        return Finding(
            name, name, t("not installed"), Status.ERROR, t("kt-kernel does not work"), f"pip install {wanted(package)}"
        )
    if outside(package, there.version) and (pinning := _pinning(facts, package)):
        return _pinned(facts, package, there.version, pinning)
    if outside(package, there.version):
        return Finding(
            name,
            name,
            t("{version}; {wanted} is needed", version=there.version, wanted=wanted(package)),
            Status.WARNING if package.needed_by else Status.ERROR,
            t("errors in {commands}", commands=package.needed_by or "kt"),
            f"pip install '{wanted(package)}'",
        )
    for other, pinned in there.pins.items():
        found = facts.installed.get(other)
        if found is not None and order(found.version) != order(pinned):
            return Finding(
                name,
                name,
                t(
                    "{version} wants {other} {pinned}, {found} is installed",
                    version=there.version,
                    other=other,
                    pinned=pinned,
                    found=found.version,
                ),
                Status.WARNING,
                t("errors when it starts: it was built for that version"),
                f"pip install '{other}=={pinned}'",
            )
    value = there.version
    if order(there.version) > order(package.tested):
        value = t("{version}, newer than {tested}, which was tested", version=there.version, tested=package.tested)
    return Finding(name, name, value)


def _pinning(facts: Facts, package: Package) -> str | None:
    """The package that wants another one in the very version that is installed."""
    version = order(facts.installed[package.name].version)
    others = facts.installed.items()
    return next((name for name, other in others if order(other.pins.get(package.name, "")) == version), None)


def _pinned(facts: Facts, package: Package, version: str, pinning: str) -> Finding:
    """A version that is right for SGLang and wrong for the embedded engine: one of the two is used here."""
    value = t(
        "{version}, as {other} wants it; the embedded engine needs {wanted}",
        version=version,
        other=pinning,
        wanted=wanted(package),
    )
    if facts.machine.gpus:  # kt run takes SGLang
        return Finding(package.name, package.name, value)
    return Finding(
        package.name,
        package.name,
        value,
        Status.WARNING,
        t("errors in {commands}", commands=package.needed_by),
        "python3 -m venv ~/kt && ~/kt/bin/pip install 'kt-kernel[engine]'",
    )


def wanted(package: Package) -> str:
    bounds = [f">={package.least}"] if package.least else []
    bounds += [f"<{package.below}"] if package.below else []
    return package.name + ",".join(bounds)


def outside(package: Package, installed: str) -> bool:
    below_least = bool(package.least) and order(installed) < order(package.least)
    return below_least or (bool(package.below) and order(installed) >= order(package.below))


def engine(facts: Facts) -> Finding:
    """What ``kt run`` would serve with."""
    title, gpus = t("Engine"), facts.machine.gpus
    if facts.sglang_takes_kt is None:
        if "transformers" not in facts.installed:
            return Finding(
                "engine",
                title,
                t("none: neither SGLang nor transformers is installed"),
                Status.WARNING,
                t("kt run cannot serve a model"),
                "pip install 'kt-kernel[engine]'",
            )
        if not gpus:
            return Finding("engine", title, t("the embedded one"))
        return Finding(
            "engine",
            title,
            t("the embedded one, although there is a GPU"),
            Status.WARNING,
            t("the GPU does nothing: attention and prompts run on the CPU"),
            "pip install sglang",
        )
    if facts.sglang_takes_kt:
        return Finding("engine", title, "SGLang" if gpus else t("the embedded one; SGLang needs a GPU"))
    return Finding(
        "engine",
        title,
        t("this SGLang has no --kt-* options"),
        Status.ERROR if gpus else Status.WARNING,
        t("it cannot put experts on the CPU"),
        f"pip install --upgrade '{wanted(next(package for package in PACKAGES if package.name == 'sglang'))}'",
    )

"""Options that several commands share: their text, and their values, checked."""

from collections.abc import Collection
from typing import Annotated, NoReturn

import typer

from kt_kernel import _core
from kt_kernel.cli.language import t

Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Worker threads (default: every usable CPU).")]
Variant = Annotated[
    str | None, typer.Option("--variant", help="Instruction sets, separated by commas (default: the best one).")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout instead of tables.")]


def variants(text: str | None) -> list[str | None]:
    """Names that run on this CPU; [None] when none is asked for."""
    if text is None:
        return [None]
    known = {variant.name: variant for variant in _core.variants()}
    names = [name.strip().lower() for name in text.split(",")]
    for name in names:
        check_one("--variant", name, known)
        if not known[name].runnable:
            runs = ", ".join(n for n, v in known.items() if v.runnable)
            reason = known[name].reason
            message = t(
                "'{name}' does not run here ({reason}); these do: {names}", name=name, reason=reason, names=runs
            )
            reject("--variant", message)
    return names


def format_list(text: str, legal: tuple[str, ...]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        check_one("--formats", name, legal)
    return names


def check_threads(threads: int | None) -> int | None:
    cpus = sum(len(node.cpus) for node in _core.topology().nodes)
    if threads is not None and threads > cpus:
        message = t(
            "{count} is more than the {cpus} CPUs that this process may use; legal: 1 to {cpus}",
            count=threads,
            cpus=cpus,
        )
        reject("--threads", message)
    return threads


def check_one(option: str, name: str, legal: Collection[str]) -> None:
    if name not in legal:
        reject(option, t("'{name}' is not one of {names}", name=name, names=", ".join(legal)))


def reject(option: str, message: str) -> NoReturn:
    raise typer.BadParameter(message, param_hint=option)

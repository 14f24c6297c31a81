"""Options that several commands share: their text, and their values, checked."""

from typing import Annotated

import typer

from kt_kernel import _core

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
        if name not in known:
            reject("--variant", f"'{name}' is not one of {', '.join(known)}")
        if not known[name].runnable:
            runs = ", ".join(n for n, v in known.items() if v.runnable)
            reject("--variant", f"'{name}' does not run here ({known[name].reason}); these do: {runs}")
    return names


def format_list(text: str, legal: tuple[str, ...]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in legal:
            reject("--formats", f"'{name}' is not one of {', '.join(legal)}")
    return names


def check_threads(threads: int | None) -> int | None:
    cpus = sum(len(node.cpus) for node in _core.topology().nodes)
    if threads is not None and threads > cpus:
        reject("--threads", f"{threads} is more than the {cpus} CPUs that this process may use; legal: 1 to {cpus}")
    return threads


def reject(option: str, message: str):
    raise typer.BadParameter(message, param_hint=option)

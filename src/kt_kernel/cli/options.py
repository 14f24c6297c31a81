"""Options that several commands share: their text, and values checked into what the bench needs."""

from pathlib import Path
from typing import Annotated

import typer

from kt_kernel import _core
from kt_kernel.bench import shapes
from kt_kernel.cli.language import t

Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Worker threads (default: every usable CPU).")]
Variant = Annotated[
    str | None, typer.Option("--variant", help="Instruction sets, separated by commas (default: the best one).")
]
Seconds = Annotated[float, typer.Option("--seconds", min=0.01, max=600, help="Time spent on each point.")]
ShapeNames = Annotated[
    str,
    typer.Option(
        "--shape", help=t("{names}, all, or E,K,H,I; several separated by spaces.", names=", ".join(shapes.SHAPES))
    ),
]
Formats = Annotated[str, typer.Option("--formats", help=t("Out of {names}.", names=", ".join(shapes.FORMATS)))]
Tokens = Annotated[str, typer.Option("--tokens", help="Token counts, 1 to 16384, separated by commas.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout instead of tables.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Write a roofline plot to this PNG.")]
Save = Annotated[bool, typer.Option("--save", help="Merge the figures into bench/results/<machine>.json.")]
Machine = Annotated[
    str | None, typer.Option("--machine", help="File name for --save (default: CPU model and variant).")
]

MAX_TOKENS = 16384


def variants(text: str | None) -> list[str | None]:
    """Names that run on this CPU; [None] when none is asked for."""
    if text is None:
        return [None]
    known = {variant.name: variant for variant in _core.variants()}
    names = [name.strip().lower() for name in text.split(",")]
    for name in names:
        if name not in known:
            _reject("--variant", f"'{name}' is not one of {', '.join(known)}")
        if not known[name].runnable:
            runs = ", ".join(n for n, v in known.items() if v.runnable)
            _reject("--variant", f"'{name}' does not run here ({known[name].reason}); these do: {runs}")
    return names


def shape_list(text: str) -> list[shapes.Shape]:
    if text == "all":
        return list(shapes.SHAPES.values())
    try:
        found = [shapes.parse(part) for part in text.split()]
    except ValueError as error:
        _reject("--shape", str(error))
    return found or _reject("--shape", f"is empty; legal: {', '.join(shapes.SHAPES)}, all, or E,K,H,I")


def format_list(text: str, legal: tuple[str, ...] = shapes.FORMATS) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in legal:
            _reject("--formats", f"'{name}' is not one of {', '.join(legal)}")
    return names


def token_list(text: str) -> list[int]:
    counts = []
    for part in text.split(","):
        if not part.strip().isdecimal() or not 1 <= int(part) <= MAX_TOKENS:
            _reject(
                "--tokens", f"'{part}' is not a number from 1 to {MAX_TOKENS}; give one or several, separated by commas"
            )
        counts.append(int(part))
    return counts


def check_threads(threads: int | None) -> int | None:
    cpus = sum(len(node.cpus) for node in _core.topology().nodes)
    if threads is not None and threads > cpus:
        _reject("--threads", f"{threads} is more than the {cpus} CPUs that this process may use; legal: 1 to {cpus}")
    return threads


def machine_name(name: str | None) -> str | None:
    if name is not None and (not name or not all(c.isalnum() or c in "-_." for c in name) or name.startswith(".")):
        _reject("--machine", f"'{name}' is not a file name; legal: letters, digits, '-', '_' and '.'")
    return name


def _reject(option: str, message: str):
    raise typer.BadParameter(message, param_hint=option)

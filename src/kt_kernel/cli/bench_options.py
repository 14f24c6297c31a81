"""Options of ``kt bench``: their text, and values checked into what measurements need."""

from pathlib import Path
from typing import Annotated

import typer

from kt_kernel.bench import shapes
from kt_kernel.cli.language import t
from kt_kernel.cli.options import reject

Seconds = Annotated[float, typer.Option("--seconds", min=0.01, max=600, help="Time spent on each point.")]
ShapeNames = Annotated[
    list[str],
    typer.Option(
        "--shape", help=t("{names}, all, or E,K,H,I; several separated by spaces.", names=", ".join(shapes.SHAPES))
    ),
]
DEFAULT_SHAPE = ["dsv3"]
Formats = Annotated[str, typer.Option("--formats", help=t("Out of {names}.", names=", ".join(shapes.FORMATS)))]
Tokens = Annotated[str, typer.Option("--tokens", help="Token counts, 1 to 16384, separated by commas.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Write a roofline plot to this PNG.")]
Save = Annotated[bool, typer.Option("--save", help="Merge the figures into bench/results/<machine>.json.")]
Machine = Annotated[
    str | None, typer.Option("--machine", help="File name for --save (default: CPU model and variant).")
]

MAX_TOKENS = 16384


def shape_list(texts: list[str]) -> list[shapes.Shape]:
    """Of one ``--shape`` or several."""
    names = " ".join(texts).split()
    if names == ["all"]:
        return list(shapes.SHAPES.values())
    try:
        found = [shapes.parse(name) for name in names]
    except ValueError as error:
        reject("--shape", str(error))
    return found or reject("--shape", t("is empty; legal: {names}, all, or E,K,H,I", names=", ".join(shapes.SHAPES)))


def token_list(text: str) -> list[int]:
    counts = []
    for part in text.split(","):
        if not part.strip().isdecimal() or not 1 <= int(part) <= MAX_TOKENS:
            message = t(
                "'{text}' is not a number from 1 to {most}; give one or several, separated by commas",
                text=part,
                most=MAX_TOKENS,
            )
            reject("--tokens", message)
        counts.append(int(part))
    return counts


def machine_name(name: str | None) -> str | None:
    if name is not None and (not name or not all(c.isalnum() or c in "-_." for c in name) or name.startswith(".")):
        reject("--machine", t("'{name}' is not a file name; legal: letters, digits, '-', '_' and '.'", name=name))
    return name

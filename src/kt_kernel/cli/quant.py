"""``kt quant``: converts the experts of a model to weights for the CPU."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from kt_kernel import _core, settings
from kt_kernel.cli import options, printing
from kt_kernel.cli.language import t
from kt_kernel.convert import ConvertError, Outcome, Settings, convert
from kt_kernel.convert.engine import QUANT_METHODS
from kt_kernel.convert.source import INPUT_TYPES
from kt_kernel.registry.find import find

SCALES = {"searched": True, "largest": False}
EXAMPLES = printing.examples(
    "kt quant ~/models/Qwen3-30B-A3B --method int4g", "kt quant ./DeepSeek-V3 -m int8 -o /data/DeepSeek-V3-int8"
)


def quant(
    model: Annotated[
        Path | None, typer.Argument(help="The folder of the model, one safetensors file, or a name.")
    ] = None,
    input_path: Annotated[Path | None, typer.Option("--input-path", help="The same, as an option.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Where the weights go (default: MODEL-METHOD in paths.weights, or beside MODEL)."
        ),
    ] = None,
    quant_method: Annotated[
        str, typer.Option("--quant-method", "--method", "-m", help=t("Out of {names}.", names=", ".join(QUANT_METHODS)))
    ] = "int4",
    input_type: Annotated[
        str,
        typer.Option(
            "--input-type", "-i", help=t("Out of {names}; found by itself.", names=", ".join(("auto", *INPUT_TYPES)))
        ),
    ] = "auto",
    scales: Annotated[
        str, typer.Option("--scales", help="searched for the least squared error, or of the largest weight.")
    ] = "searched",
    threads: Annotated[
        int | None,
        typer.Option("--cpuinfer-threads", "--cpu-threads", min=1, help="Threads (default: every usable CPU)."),
    ] = None,
    threadpool_count: Annotated[
        int | None,
        typer.Option("--threadpool-count", "--numa-nodes", min=1, help="Not needed: the files fit any number."),
    ] = None,
    no_merge: Annotated[
        bool,
        typer.Option("--no-merge-safetensor", "--no-merge", help="Not needed: every layer is a file of its own."),
    ] = False,
    resume_layer: Annotated[
        int, typer.Option("--resume-layer", min=0, help="Leave the layers below this one as they are.")
    ] = 0,
    gpu: Annotated[bool, typer.Option("--gpu", help="Not needed: no GPU is used.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin anew in a folder that holds other converted weights.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Not needed: nothing is asked.")] = False,
) -> None:
    """Convert the experts of a checkpoint (bf16, f16, FP8, GPTQ, AWQ, ...) to int8 or int4 for the CPU.

    A conversion that was interrupted goes on where it stopped, with the same command.
    """
    source = input_path or model
    if source is None or (input_path and model):
        options.reject("MODEL", t("name the folder of the model, once"))
    options.check_one("--quant-method", quant_method, QUANT_METHODS)
    options.check_one("--input-type", input_type, ("auto", *INPUT_TYPES))
    options.check_one("--scales", scales, SCALES)
    source = _located(source)
    wanted = Settings(
        source,
        output or _default_output(source.resolve(), quant_method),
        quant_method,
        input_type,
        SCALES[scales],
        threads,
        resume_layer,
        overwrite=overwrite,
    )
    code = run("kt quant", wanted, unneeded(threadpool_count, no_merge, gpu))
    if code:
        raise typer.Exit(code)


def _located(source: Path) -> Path:
    """A path, or where the model of this name is."""
    if source.exists() or source.is_absolute():
        return source
    found = find(str(source))
    if found.path is None:
        printing.fail("quant", t("{name} is not here: kt model download {name}", name=found.name))
    return found.path


def _default_output(source: Path, quant_method: str) -> Path:
    name = f"{source.stem if source.is_file() else source.name}-{QUANT_METHODS[quant_method]}"
    weights = settings.get("paths.weights")
    return Path(weights).expanduser() / name if weights else source.with_name(name)


def unneeded(threadpool_count: int | None, no_merge: bool, gpu: bool) -> list[str]:
    """What options of kt-kernel 0.4 to 0.7 are for here."""
    notes = {
        t("--threadpool-count: the files fit any number of sub-pools, so none is written into them"): threadpool_count,
        t("--no-merge-safetensor: every layer is a file of its own, and memory is bounded, without it too"): no_merge,
        t("--gpu: no GPU is needed or used"): gpu,
    }
    return [note for note, given in notes.items() if given]


def run(program: str, settings: Settings, notes: list[str]) -> int:
    """Converts, shows how it goes and what came out; returns the exit code."""
    from dataclasses import replace

    from kt_kernel.convert.display import Display, show_quality

    cpus = _core.topology().cpus
    if settings.threads is not None and settings.threads > cpus:
        asked = settings.threads
        note = t(
            "{asked} threads were asked for; this process may use {cpus} CPUs: using {cpus}", asked=asked, cpus=cpus
        )
        notes, settings = [*notes, note], replace(settings, threads=cpus)
    try:
        with Display() as display:
            for note in notes:
                display.note(note)
            outcome = convert(settings, display)
    except (ConvertError, OSError, ValueError, KeyError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{program}: {t('interrupted; the same command goes on with what is left')}", file=sys.stderr)
        return 130
    show_quality(outcome.quality)
    print(_summary(settings, outcome))
    return 0


def _summary(settings: Settings, outcome: Outcome) -> str:
    kept = t(", {count} were there", count=len(outcome.kept)) if outcome.kept else ""
    missing = t(", {count} are missing", count=len(outcome.missing)) if outcome.missing else ""
    return t(
        "{path}: {count} layers converted in {seconds} s{kept}{missing}; load them with method {method} (SGLang: "
        "--kt-weight-path {path} --kt-method {method}), any threadpool count",
        path=settings.output,
        count=len(outcome.converted),
        seconds=f"{outcome.seconds:.1f}",
        kept=kept,
        missing=missing,
        method=outcome.method,
    )

"""The conversion: one layer at a time from a checkpoint into files, with all cores, on the CPU alone.

Memory holds as many experts as there are threads, never a whole layer. A conversion that was interrupted, or killed,
goes on where it stopped: layers of the manifest whose bytes are still right are kept, everything else is made again.
"""

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from kt_kernel import _core
from kt_kernel.convert import quality
from kt_kernel.convert.errors import ConvertError
from kt_kernel.convert.folder import OutputFolder, Record, digest, identity_of
from kt_kernel.convert.source import Source, SourceLayer, open_source
from kt_kernel.weights.canonical import file_name
from kt_kernel.weights.checkpoint import CheckpointExperts
from kt_kernel.weights.converting import coded_format, convert_layer
from kt_kernel.weights.progress import Report
from kt_kernel.weights.tensor_files import TensorFiles
from kt_kernel.weights.writer import file_bytes

# --quant-method -> the method of KTMoEWrapper that loads the result
QUANT_METHODS = {
    "int4": "AMXINT4",
    "int8": "AMXINT8",
    "int4g": "INT4G",
    "moe_int4": "MOE_INT4",
    "moe_int8": "MOE_INT8",
}


@dataclass(frozen=True)
class Settings:
    source: Path
    output: Path
    quant_method: str = "int4"
    input_type: str | None = None  # as the user calls it; what is stored decides
    search: bool = True
    threads: int | None = None  # None: every CPU that this process may use
    first_layer: int = 0  # layers below are left as they are
    overwrite: bool = False


class Outcome(NamedTuple):
    method: str  # of KTMoEWrapper
    converted: list[int]
    kept: list[int]
    missing: list[int]  # below first_layer, and not there
    quality: dict[str, object]
    seconds: float


class Observer(Protocol):
    """Who watches: counts are of experts."""

    def note(self, text: str) -> None: ...

    def begin(self, what: str, total: int) -> None: ...

    def advance(self, count: int) -> None: ...

    def finished(self, layer_idx: int, record: Record) -> None: ...


def convert(settings: Settings, observer: Observer) -> Outcome:
    """Raises ConvertError, or what reading weights raises: ValueError, OSError, KeyError."""
    begun = time.monotonic()
    method = _method(settings)
    weight_format = coded_format(method)
    source = open_source(settings.source)
    _explain(settings, source, observer)
    if settings.output.resolve() == source.folder.resolve():
        raise ConvertError(f"{settings.output} is the folder of the source; choose another one for the output")
    files = sorted({file for layer in source.layers for file in layer.files})
    identity = identity_of(weight_format, method, settings.search, source, files)
    threads = settings.threads or _core.topology().cpus
    folder = OutputFolder(settings.output, identity)
    with folder.opened(settings.overwrite):
        kept, wanted, missing = _sort_out(folder, source, settings.first_layer, threads, observer)
        for layer in wanted:
            folder.discard(layer.index)
        sizes = (file_bytes(item.index, weight_format, item.experts, item.sizes, item.biases) for item in wanted)
        folder.check_space(sum(sizes))
        observer.begin("converting", sum(layer.experts for layer in wanted))
        _convert_layers(source, wanted, method, settings.search, threads, folder, observer)
        about = {"method": method, "format": weight_format, "scales": identity["scales"]}
        report = quality.report(folder.records, about)
        folder.finish(report, source.folder, complete=not missing)
    return Outcome(method, [layer.index for layer in wanted], kept, missing, report, time.monotonic() - begun)


def _method(settings: Settings) -> str:
    if settings.quant_method not in QUANT_METHODS:
        raise ConvertError(
            f"quant method {settings.quant_method!r} is unknown; the methods are {', '.join(QUANT_METHODS)}"
        )
    return QUANT_METHODS[settings.quant_method]


def _explain(settings: Settings, source: Source, observer: Observer) -> None:
    first, last = source.layers[0], source.layers[-1]
    observer.note(
        f"{source.path}: {len(source.layers)} layers ({first.index}..{last.index}) of {first.experts} experts, "
        f"{first.sizes.hidden} x {first.sizes.intermediate}, stored as {source.input_type}"
    )
    if source.left_out:
        observer.note(
            f"layers {', '.join(map(str, source.left_out))} have experts, but config.json does not count them: left out"
        )
    if settings.input_type not in (None, "auto", source.input_type):
        observer.note(f"input type {settings.input_type} was asked for; what is stored, {source.input_type}, decides")


def _sort_out(
    folder: OutputFolder, source: Source, first_layer: int, threads: int, observer: Observer
) -> tuple[list[int], list[SourceLayer], list[int]]:
    """Layers that are there and sound, those to convert, and those below first_layer that are not there."""
    known = {layer.index for layer in source.layers}
    folder.records = {index: record for index, record in folder.records.items() if index in known}
    there = [layer for layer in source.layers if layer.index in folder.records]
    sound: set[int] = set()
    if there:
        observer.begin("checking what is there", sum(layer.experts for layer in there))
        with ThreadPoolExecutor(threads) as workers:
            for layer, good in zip(there, workers.map(folder.is_sound, [item.index for item in there]), strict=True):
                observer.advance(layer.experts)
                if good:
                    sound.add(layer.index)
                else:
                    observer.note(f"{file_name(layer.index)} is missing or damaged: it is made again")
    wanted = [layer for layer in source.layers if layer.index not in sound and layer.index >= first_layer]
    missing = [layer.index for layer in source.layers if layer.index not in sound and layer.index < first_layer]
    for index in missing:
        folder.discard(index)
    if missing:
        observer.note(f"layers {', '.join(map(str, missing))}, below layer {first_layer}, are left out and not there")
    return sorted(sound), wanted, missing


def _convert_layers(
    source: Source,
    wanted: list[SourceLayer],
    method: str,
    search: bool,
    threads: int,
    folder: OutputFolder,
    observer: Observer,
) -> None:
    """A finished layer is summed up while the next one is begun; then it counts."""
    summed: deque[tuple[int, Record, Future[str]]] = deque()

    def settle(wait: bool) -> None:
        while summed and (wait or summed[0][2].done()):
            index, record, sha256 = summed.popleft()
            record["sha256"] = sha256.result()
            folder.add(index, record)
            observer.finished(index, record)

    def advance(*_) -> None:
        observer.advance(1)
        settle(wait=False)

    with ThreadPoolExecutor(1) as summing:
        try:
            for layer in wanted:
                record = _convert_one(source, layer, method, search, threads, folder.path, advance)
                settle(wait=True)
                summed.append((layer.index, record, summing.submit(digest, folder.path / record["file"])))
        finally:
            settle(wait=True)


def _convert_one(
    source: Source, layer: SourceLayer, method: str, search: bool, threads: int, folder: Path, progress: Report
) -> Record:
    begun = time.monotonic()
    with CheckpointExperts(TensorFiles(source.path), layer.index, layer.sizes) as experts:
        made = convert_layer(experts, method, folder, layer.index, threads=threads, search=search, progress=progress)
    return {
        "file": made.path.name,
        "bytes": made.path.stat().st_size,
        "seconds": round(time.monotonic() - begun, 3),
        "quality": quality.of_layer(made.errors),
    }

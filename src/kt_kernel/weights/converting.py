"""Quantises the experts of a layer into a file of canonical.py: several experts at a time, each in a thread of its own.

A thread reads, decodes, quantises and writes one expert after the other, so that all cores are busy from the first to
the last step, whatever a step costs, and as many experts are in memory as there are threads.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from math import isfinite
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from kt_kernel import _core
from kt_kernel.methods import KEPT_FORMATS, LLAMAFILE, format_of
from kt_kernel.weights.canonical import Coded
from kt_kernel.weights.experts import PROJECTIONS, Sizes
from kt_kernel.weights.progress import Progress, Report
from kt_kernel.weights.writer import LayerWriter


class Convertible(Protocol):
    """Sources of experts whose weights are numbers, by logical id."""

    where: str
    count: int
    sizes: Sizes
    biases: bool

    def matrices(self, expert: int) -> list[object]:
        """bf16 gate, up and down."""

    def bias_vectors(self, expert: int) -> list[np.ndarray]:
        """f32 gate, up and down, of experts that have biases."""

    def will_need(self, expert: int) -> None: ...

    def forget(self) -> None: ...


class SquaredError(NamedTuple):
    """Sums over the weights of a matrix: (w - converted)^2, and w^2."""

    error: float
    weight: float


class ConvertedExpert(NamedTuple):
    coded: list[Coded]
    errors: list[SquaredError]  # gate, up, down


class ConvertedLayer(NamedTuple):
    path: Path
    errors: list[list[SquaredError]]  # of each expert: gate, up, down


def coded_format(method: str) -> str:
    weight_format = None if method == LLAMAFILE else format_of(method)
    if weight_format in (None, "bf16") or weight_format in KEPT_FORMATS:
        raise ValueError(f"method {method} keeps weights as they are: there is nothing to convert or to save")
    return weight_format


def convert_layer(
    experts: Convertible,
    method: str,
    folder: Path,
    layer_idx: int,
    *,
    threads: int = 1,
    pool: "_core.Pool | None" = None,
    search: bool = False,
    progress: Report | None = None,
    finished: Callable[[int, list[Coded]], None] = lambda *_: None,
) -> ConvertedLayer:
    """With one thread it is the caller's, and the workers of `pool` share each matrix.

    finished(expert, coded) sees each expert, in order and in the thread of the caller.
    """
    weight_format = coded_format(method)
    writer = LayerWriter(folder, layer_idx, weight_format, experts.count, experts.sizes, experts.biases)

    def convert(expert: int) -> ConvertedExpert:
        matrices = experts.matrices(expert)
        coded = [_core.quantise(pool, weight_format, matrix, search=search) for matrix in matrices]
        pairs = zip(matrices, coded, strict=True)
        errors = [SquaredError(*_core.squared_error(weight_format, *pair)) for pair in pairs]
        _check_finite(experts.where, expert, errors)
        writer.write(expert, coded, experts.bias_vectors(expert) if experts.biases else ())
        return ConvertedExpert(coded, errors)

    errors: list[list[SquaredError]] = []
    # Threads end before the file is closed.
    with (
        writer,
        Progress(f"layer {layer_idx}", experts.count, progress) as bar,
        closing(_in_order(convert, experts, threads)) as converted,
    ):
        for expert, (coded, of_expert) in enumerate(converted):
            finished(expert, coded)
            errors.append(of_expert)
            experts.forget()
            bar.advance()
    return ConvertedLayer(writer.path, errors)


def _in_order(
    convert: Callable[[int], ConvertedExpert], experts: Convertible, threads: int
) -> Iterator[ConvertedExpert]:
    """All experts, each read ahead while those before it are converted."""
    if threads == 1:
        for expert in range(experts.count):
            if expert + 1 < experts.count:
                experts.will_need(expert + 1)
            yield convert(expert)
        return
    running: deque[Future[ConvertedExpert]] = deque()
    with ThreadPoolExecutor(min(threads, experts.count)) as workers:
        try:
            for expert in range(experts.count):
                if len(running) > threads:  # one waits for a thread
                    yield running.popleft().result()
                experts.will_need(expert)
                running.append(workers.submit(convert, expert))
            while running:
                yield running.popleft().result()
        finally:
            workers.shutdown(cancel_futures=True)


def _check_finite(where: str, expert: int, errors: list[SquaredError]) -> None:
    for projection, sums in zip(PROJECTIONS, errors, strict=True):
        if not (isfinite(sums.error) and isfinite(sums.weight)):
            raise ValueError(
                f"{where}: {projection} of expert {expert} has weights that are NaN, infinite or beyond 1e18, which "
                "cannot be quantised; is the download damaged?"
            )

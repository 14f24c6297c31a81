"""``kt bench peers``: another implementation and us, taking turns in one run.

The format decides who that is: GGUF types go against llama.cpp, the others against the released package; or all of
them against one of our own formats.
"""

import base64
from abc import ABC, abstractmethod
from dataclasses import asdict
from pathlib import Path
from statistics import median

from kt_kernel.bench import figures, llamacpp_build, wheel
from kt_kernel.bench.client import Client
from kt_kernel.bench.errors import BenchError, SideError
from kt_kernel.bench.kernels import plan_layer
from kt_kernel.bench.progress import Progress
from kt_kernel.bench.run import Findings, Settings
from kt_kernel.bench.shapes import GGUF_TYPES, Shape, planned_bytes
from kt_kernel.machine import system

ROUNDS = 4

# Two right answers differ by their roundings. Between two functions, or two routings, the distance is above 1.
TOLERANCE = {"bf16": 0.02, "int8": 0.08, "int4": 0.08, "fp8": 0.02, "rawint4": 0.05}
TOLERANCE |= dict.fromkeys(GGUF_TYPES, 0.04)

# Two formats of the same weights differ by what both lose: int4 alone is at 0.22 for a Gaussian matrix, three follow.
_TOLERANCE_BETWEEN_FORMATS = 0.5

# The thread count that is best here is also taken for more tokens, where one call of the peer can take a minute.
_MOST_TOKENS_TO_CHOOSE_THREADS = 256

# Few tokens and many take different kernels; more than these would only take longer.
_TOKENS_TO_CHECK = 4
_MOST_TOKENS_TO_CHECK = 256


def thread_counts() -> list[int]:
    """Candidates, most threads first: every CPU, one and two spared for the caller, one per core."""
    cpus = len(system.usable_cpus())
    return sorted({n for n in (cpus, cpus - 1, cpus - 2, system.physical_cores()) if n >= 1}, reverse=True)


class Peer(ABC):
    """Another implementation of the same function on the same weights."""

    name: str

    @abstractmethod
    def client(self, variant: str) -> Client: ...

    @abstractmethod
    def bytes_per_expert(self, shape: Shape, weight_format: str) -> int:
        """Of memory, beside ours."""

    def has(self, client: Client, weight_format: str) -> bool:
        return weight_format in client.call("hello")["formats"]

    def opening(self, weight_format: str) -> dict:
        """What it is asked to open for our ``weight_format``."""
        return {"weight_format": weight_format}

    def tolerance(self, weight_format: str) -> float:
        return TOLERANCE[weight_format]


class ReleasedPeer(Peer):
    """The released package: its native module for a variant."""

    name = wheel.RELEASED.replace("==", " ")

    def __init__(self, progress: Progress, path: Path | None):
        progress.say(f"fetching {wheel.RELEASED}")
        self._folder = path or wheel.fetch()

    def client(self, variant: str) -> Client:
        return Client("released", str(wheel.native_module(self._folder, variant)), variant=variant)

    def bytes_per_expert(self, shape: Shape, weight_format: str) -> int:
        """Its copy, and the bf16 source that it loads from."""
        return planned_bytes(shape, weight_format) + planned_bytes(shape, "bf16")


class LlamaCppPeer(Peer):
    """llama.cpp: its CPU module with the instructions of a variant."""

    name = llamacpp_build.NAME

    def __init__(self, progress: Progress):
        self._folder = llamacpp_build.build(progress.say)

    def client(self, variant: str) -> Client:
        return Client("llamacpp", str(self._folder), llamacpp_build.module_of(variant), variant=variant)

    def bytes_per_expert(self, shape: Shape, weight_format: str) -> int:
        """As the file has it, and repacked."""
        return 2 * planned_bytes(shape, weight_format)


class OwnPeer(Peer):
    """Ourselves with another format."""

    def __init__(self, weight_format: str):
        self.name, self._format = f"our {weight_format}", weight_format

    def client(self, variant: str) -> Client:
        return Client("ours", variant=variant)

    def bytes_per_expert(self, shape: Shape, weight_format: str) -> int:
        return planned_bytes(shape, self._format)

    def has(self, client: Client, weight_format: str) -> bool:
        return True

    def opening(self, weight_format: str) -> dict:
        return {"weight_format": self._format, "seeded": True}

    def tolerance(self, weight_format: str) -> float:
        return _TOLERANCE_BETWEEN_FORMATS


def measure_peers(
    settings: Settings, findings: Findings, progress: Progress, peer_path: Path | None, against: str | None = None
) -> None:
    for peer, formats in _matches(settings, progress, peer_path, against):
        for variant in settings.variants:
            for weight_format in formats:
                for shape in settings.shapes:
                    _measure(peer, settings, findings, progress, variant, weight_format, shape)
    # Taken in the order of thread counts.
    findings.figures.sort(key=lambda figure: [figure[name] for name in ("variant", "shape", "format", "tokens")])


def _matches(
    settings: Settings, progress: Progress, peer_path: Path | None, against: str | None
) -> list[tuple[Peer, list[str]]]:
    if against:
        return [(OwnPeer(against), settings.formats)]
    gguf_types = [name for name in settings.formats if name in GGUF_TYPES]
    others = [name for name in settings.formats if name not in GGUF_TYPES]
    # Both are there before either is measured: what cannot be fetched or built ends the run at once.
    matches: list[tuple[Peer, list[str]]] = []
    if others:
        matches.append((ReleasedPeer(progress, peer_path), others))
    if gguf_types:
        matches.append((LlamaCppPeer(progress), gguf_types))
    return matches


def _measure(
    peer: Peer,
    settings: Settings,
    findings: Findings,
    progress: Progress,
    variant: str,
    weight_format: str,
    shape: Shape,
) -> None:
    try:
        with peer.client(variant) as theirs, Client("ours", variant=variant) as ours:
            try:
                if not peer.has(theirs, weight_format):
                    findings.note(f"{peer.name} has no {weight_format} on {variant}")
                    return
                _Match(peer, ours, theirs, settings, findings, progress, variant, weight_format, shape).play()
            except SideError as error:
                findings.fail(f"{variant} {shape.name} {weight_format}: {error}")
    except BenchError as error:
        findings.fail(str(error))


class _Match:
    """One layer, both sides."""

    def __init__(
        self,
        peer: Peer,
        ours: Client,
        theirs: Client,
        settings: Settings,
        findings: Findings,
        progress: Progress,
        variant: str,
        weight_format: str,
        full: Shape,
    ):
        self._sides = {"ours": ours, "peer": theirs}
        self._peer = peer
        self._settings, self._findings, self._progress = settings, findings, progress
        self._variant, self._format = variant, weight_format
        extra = peer.bytes_per_expert(full, weight_format)
        self._shape, self._copies = plan_layer(full, weight_format, findings, extra)
        self._open_with: dict[str, int] = {}
        self._bytes_per_expert: dict[str, int] = {}
        self._error = 0.0

    def play(self) -> None:
        candidates = [self._settings.threads] if self._settings.threads else thread_counts()
        self._check(candidates[0])
        choice = self._choose_threads(candidates)
        # Points that share thread counts follow each other: changing them means packing again.
        for tokens in sorted(self._settings.tokens, key=lambda t: (choice[t]["ours"], choice[t]["peer"], t)):
            self._progress.say(f"{self._label()} T={tokens}")
            threads = choice[tokens]
            for name in self._sides:
                self._open(name, threads[name])
            taken = {name: {"threads": threads[name], "us": [], "bytes": 0.0} for name in self._sides}
            for _ in range(ROUNDS):
                for name, side in self._sides.items():
                    answer = side.call("time", tokens=tokens, seconds=self._settings.seconds / ROUNDS)
                    taken[name]["us"] += answer["us"]
                    taken[name]["bytes"] = answer["unique_experts"] * self._bytes_per_expert[name]
                    if "layout" in answer:
                        taken[name]["layout"] = answer["layout"]
            self._findings.figures.append(
                figures.peer_figure(
                    shape=self._shape,
                    weight_format=self._format,
                    tokens=tokens,
                    variant=self._variant,
                    error=self._error,
                    peer_name=self._peer.name,
                    **taken,
                )
            )
            self._progress.done()

    def _choose_threads(self, candidates: list[int]) -> dict[int, dict[str, int]]:
        """tokens -> side -> thread count."""
        tokens = sorted(self._settings.tokens)
        trials = [t for t in tokens if t <= _MOST_TOKENS_TO_CHOOSE_THREADS] or tokens[:1]
        best: dict[int, dict[str, int]] = {t: dict.fromkeys(self._sides, candidates[0]) for t in trials}
        if len(candidates) > 1:
            fastest: dict[tuple[int, str], float] = {}
            for threads in candidates:
                self._progress.say(f"{self._label()}: {threads} threads?")
                for name, side in self._sides.items():
                    self._open(name, threads)
                    for t in trials:
                        us = median(side.call("time", tokens=t, seconds=self._settings.seconds / 2)["us"])
                        if us < fastest.get((t, name), float("inf")):
                            fastest[t, name], best[t][name] = us, threads
        return {t: best[max(trial for trial in trials if trial <= max(t, trials[0]))] for t in tokens}

    def _open(self, name: str, threads: int) -> None:
        if self._open_with.get(name) == threads:
            return
        self._open_with[name] = threads
        arguments = {"shape": asdict(self._shape), "threads": threads, "copies": self._copies}
        arguments["max_tokens"] = max(*self._settings.tokens, _TOKENS_TO_CHECK)
        if name == "ours":
            arguments |= {"weight_format": self._format, "seeded": True}
        else:
            arguments |= self._peer.opening(self._format)
        opened = self._sides[name].call("open", **arguments)
        self._bytes_per_expert[name] = opened["packed_bytes_per_expert"]

    def _check(self, threads: int) -> None:
        """Both sides must compute the same function before their times are compared."""
        self._progress.say(f"{self._label()}: packing {self._shape.experts} experts")
        for name in self._sides:
            self._open(name, threads)
        many = max((t for t in self._settings.tokens if t <= _MOST_TOKENS_TO_CHECK), default=_TOKENS_TO_CHECK)
        for tokens in {_TOKENS_TO_CHECK, many}:
            mine, theirs = (_decode(side.call("output", tokens=tokens)) for side in self._sides.values())
            error = relative_error(mine, theirs)
            limit = self._peer.tolerance(self._format)
            if not error <= limit:  # NaN too
                raise SideError(f"outputs differ by {error:.3f} (limit {limit}): not timed")
            self._error = max(self._error, error)

    def _label(self) -> str:
        return f"{self._variant} {self._shape.name} {self._format}"


def relative_error(mine, theirs) -> float:
    import numpy as np

    return float(np.linalg.norm(mine - theirs) / np.linalg.norm(theirs))


def _decode(answer: dict):
    import numpy as np

    from kt_kernel.bench.batch import to_float

    return to_float(np.frombuffer(base64.b64decode(answer["bf16"]), np.uint16)).astype(np.float64)

"""``kt bench peers``: the released package and us, taking turns in one run."""

import base64
from dataclasses import asdict
from pathlib import Path
from statistics import median

from kt_kernel.bench import figures, machine, wheel
from kt_kernel.bench.client import Client
from kt_kernel.bench.errors import BenchError, SideError
from kt_kernel.bench.kernels import plan_layer
from kt_kernel.bench.progress import Progress
from kt_kernel.bench.run import Findings, Settings
from kt_kernel.bench.shapes import Shape, planned_bytes

ROUNDS = 4

# Two right answers differ by their roundings. Between two functions, or two routings, the distance is above 1.
TOLERANCE = {"bf16": 0.02, "int8": 0.08, "int4": 0.08, "fp8": 0.02, "rawint4": 0.05}

# The thread count that is best here is also taken for more tokens, where one call of the peer can take a minute.
_MOST_TOKENS_TO_CHOOSE_THREADS = 256
_TOKENS_TO_CHECK = 4


def thread_counts() -> list[int]:
    """Candidates, most threads first: every CPU, one and two spared for the caller, one per core."""
    cpus = len(machine.usable_cpus())
    return sorted({n for n in (cpus, cpus - 1, cpus - 2, machine.physical_cores()) if n >= 1}, reverse=True)


def measure_peers(settings: Settings, findings: Findings, progress: Progress, peer_path: Path | None) -> None:
    progress.say(f"fetching {wheel.RELEASED}")
    folder = peer_path or wheel.fetch()
    for variant in settings.variants:
        try:
            module = wheel.native_module(folder, variant)
        except BenchError as error:
            findings.fail(str(error))
            continue
        for weight_format in settings.formats:
            for shape in settings.shapes:
                with Client("ours", variant=variant) as ours, Client("released", str(module), variant=variant) as peer:
                    try:
                        if weight_format not in peer.call("hello")["formats"]:
                            findings.note(f"the released package has no {weight_format} on {variant}")
                            continue
                        _Match(ours, peer, settings, findings, progress, variant, weight_format, shape).play()
                    except SideError as error:
                        findings.fail(f"{variant} {shape.name} {weight_format}: {error}")
    # Taken in the order of thread counts.
    findings.figures.sort(key=lambda figure: [figure[name] for name in ("variant", "shape", "format", "tokens")])


class _Match:
    """One layer, both sides."""

    def __init__(
        self,
        ours: Client,
        peer: Client,
        settings: Settings,
        findings: Findings,
        progress: Progress,
        variant: str,
        weight_format: str,
        full: Shape,
    ):
        self._sides = {"ours": ours, "peer": peer}
        self._settings, self._findings, self._progress = settings, findings, progress
        self._variant, self._format = variant, weight_format
        # Besides our packed copy: the peer's, and the bf16 source that it loads from.
        extra = planned_bytes(full, weight_format) + planned_bytes(full, "bf16")
        self._shape, self._copies = plan_layer(full, weight_format, findings, extra)
        self._open_with: dict[str, int] = {}
        self._bytes_per_expert: dict[str, int] = {}
        self._error = float("nan")

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
            self._findings.figures.append(
                figures.peer_figure(
                    shape=self._shape,
                    weight_format=self._format,
                    tokens=tokens,
                    variant=self._variant,
                    error=self._error,
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
        arguments = {"shape": asdict(self._shape), "weight_format": self._format, "threads": threads}
        arguments |= {"max_tokens": max(*self._settings.tokens, _TOKENS_TO_CHECK), "copies": self._copies}
        if name == "ours":
            arguments["seeded"] = True
        opened = self._sides[name].call("open", **arguments)
        self._bytes_per_expert[name] = opened["packed_bytes_per_expert"]

    def _check(self, threads: int) -> None:
        """Both sides must compute the same function before their times are compared."""
        self._progress.say(f"{self._label()}: packing {self._shape.experts} experts")
        for name in self._sides:
            self._open(name, threads)
        mine, theirs = (_decode(side.call("output", tokens=_TOKENS_TO_CHECK)) for side in self._sides.values())
        self._error = relative_error(mine, theirs)
        if not self._error <= TOLERANCE[self._format]:
            raise SideError(f"outputs differ by {self._error:.3f} (limit {TOLERANCE[self._format]}): not timed")

    def _label(self) -> str:
        return f"{self._variant} {self._shape.name} {self._format}"


def relative_error(mine, theirs) -> float:
    import numpy as np

    return float(np.linalg.norm(mine - theirs) / np.linalg.norm(theirs))


def _decode(answer: dict):
    import numpy as np

    from kt_kernel.bench.batch import to_float

    return to_float(np.frombuffer(base64.b64decode(answer["bf16"]), np.uint16)).astype(np.float64)

"""Our side of a measurement, inside its own process."""

import base64

from kt_kernel import __cpu_variant__, __version__, _core
from kt_kernel.bench import layer
from kt_kernel.bench.batch import Batch
from kt_kernel.bench.shapes import Shape
from kt_kernel.bench.timing import sample

# A probe between the rounds of a point: long enough for a few undisturbed rounds of its own.
PROBE_SECONDS = 0.05


class Ours:
    """Answers the requests of ``client``; every public method is one."""

    def __init__(self) -> None:
        self._pools: dict[int, _core.Pool] = {}
        self._pool: _core.Pool | None = None
        self._probe: _core.ReadProbe | None = None
        self._layers: layer.Layers | None = None
        self._batch: Batch | None = None

    def hello(self) -> dict:
        return {"variant": __cpu_variant__, "version": __version__, "default_threads": layer.default_threads()}

    def limits(self, threads: int | None, gigabytes: float, seconds: float) -> dict:
        pool = self._open_pool(threads)
        peaks = {unit: _core.measure_peak(pool, unit, seconds) for unit in layer.LIMIT_UNITS}
        return {
            "read_gbps": _core.measure_read_bandwidth(pool, gigabytes, seconds),
            "peaks": {unit: ops for unit, ops in peaks.items() if ops is not None},
        }

    def open(
        self, shape: dict, weight_format: str, threads: int | None, max_tokens: int, copies: int, seeded: bool
    ) -> dict:
        self.close()
        self._pool = self._open_pool(threads)
        self._layers = layer.Layers(self._pool, Shape(**shape), weight_format, max_tokens, copies)
        self._layers.load_seeded() if seeded else self._layers.fill_random()
        return {"packed_bytes_per_expert": self._layers.packed_bytes_per_expert}

    def close(self) -> None:
        self._layers = self._probe = self._batch = None

    def point(self, tokens: int, seconds: float, rounds: int, gigabytes: float, unit: str | None) -> dict:
        """Rounds of calls, each beside what the memory and the arithmetic unit give at that moment."""
        if self._probe is None:
            self._probe = _core.ReadProbe(self._pool, gigabytes)
        batch = self._batch_of(tokens)
        answer: dict = {"unique_experts": batch.unique_experts, "rounds": []}
        calls = 1
        for _ in range(rounds):
            read_gbps = self._probe.measure(PROBE_SECONDS)
            peaks = layer.measure_peaks(self._pool, unit, PROBE_SECONDS)
            us = sample(lambda call: self._layers.forward(batch, call), seconds / rounds, calls)
            calls += len(us)
            answer["rounds"].append({"read_gbps": read_gbps, **peaks, "us": us})
        return answer

    def time(self, tokens: int, seconds: float) -> dict:
        batch = self._batch_of(tokens)
        return {
            "unique_experts": batch.unique_experts,
            "us": sample(lambda call: self._layers.forward(batch, call), seconds),
        }

    def output(self, tokens: int) -> dict:
        batch = self._batch_of(tokens)
        self._layers.forward(batch, 0)
        return {"bf16": base64.b64encode(batch.output.tobytes()).decode()}

    def _open_pool(self, threads: int | None) -> "_core.Pool":
        threads = threads or layer.default_threads()
        if threads not in self._pools:
            self._pools[threads] = layer.open_pool(threads)
        return self._pools[threads]

    def _batch_of(self, tokens: int) -> Batch:
        if self._batch is None or self._batch.tokens != tokens:
            self._batch = Batch(self._layers.shape, tokens)
            self._layers.forward(self._batch, 0)  # touches every buffer
        return self._batch

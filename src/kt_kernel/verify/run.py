"""``kt verify``: asks a process for each comparison, and says what came of it. A comparison that kills its process, or
raises, has failed; the others go on.
"""

import time
from dataclasses import dataclass
from typing import Protocol

import kt_kernel
from kt_kernel import _core
from kt_kernel.bench.client import Client
from kt_kernel.bench.errors import SideError
from kt_kernel.verify.gpu_slices import FORMATS, RANKS
from kt_kernel.verify.random_experts import formats

SIDE = "verify"
TOKENS, QUICK_TOKENS = 512, 128  # of the text that a whole model reads
# One thread for numpy: its threads and those of the pools would wait for each other.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}


class Watcher(Protocol):
    """Is told how it goes."""

    def say(self, text: str) -> None: ...

    def done(self) -> None: ...


@dataclass(frozen=True)
class Request:
    """What to compare. No path: kernels only."""

    path: str | None = None
    method: str = "auto"
    layer_idx: int | None = None
    threads: int | None = None
    tokens: int | None = None
    quick: bool = False
    trust_remote_code: bool = False
    formats: tuple[str, ...] = ()  # none: all
    variants: tuple[str, ...] = ()  # none: all that run here, or with `quick` the one that computes

    @property
    def points(self) -> int:
        return len(self.formats or formats()) + (2 if self.path else 0)


def native_variants() -> tuple[str, ...]:
    """Instruction sets that run here, best first; emulated ones only where there is no other."""
    runnable = [variant for variant in _core.variants() if variant.runnable]
    native = [variant.name for variant in runnable if not variant.emulated]
    return tuple(native or (kt_kernel.__cpu_variant__,))


def verify(request: Request, watcher: Watcher) -> dict:
    """The whole report, in plain values."""
    begin = time.monotonic()
    report = {
        "version": kt_kernel.__version__,
        "variant": kt_kernel.__cpu_variant__,
        "kernels": _verify_kernels(request, watcher),
        "slices": _verify_slices(request),
        "layer": None,
        "model": None,
    }
    if request.path is not None:
        watcher.say(f"a layer of {request.path}")
        report["layer"] = _asked(
            "layer", path=request.path, layer_idx=request.layer_idx, method=request.method, threads=request.threads
        )
        watcher.done()
        watcher.say(f"{request.path} on a text")
        report["model"] = _asked(
            "model",
            path=request.path,
            method=request.method,
            tokens=request.tokens or (QUICK_TOKENS if request.quick else TOKENS),
            threads=request.threads,
            trust_remote_code=request.trust_remote_code,
        )
        watcher.done()
    report["ok"] = not any(part.get("failures") for part in parts_of(report))
    report["seconds"] = round(time.monotonic() - begin, 1)
    return report


def parts_of(report: dict) -> list[dict]:
    """Everything that may have failures."""
    return [*report["kernels"], *report["slices"], *(report[name] for name in ("layer", "model") if report[name])]


def _verify_slices(request: Request) -> list[dict]:
    wanted = [name for name in FORMATS if name in (request.formats or FORMATS)]
    if not wanted:
        return []
    found = _asked("slices", formats=wanted)
    return found if isinstance(found, list) else [{"format": " ".join(wanted), "ranks": list(RANKS), **found}]


def _verify_kernels(request: Request, watcher: Watcher) -> list[dict]:
    variants = list(request.variants or ((kt_kernel.__cpu_variant__,) if request.quick else native_variants()))
    found: list[dict] = []
    client: Client | None = None
    try:
        for weight_format in request.formats or formats():
            watcher.say(weight_format)
            client = client or _client()
            try:
                found += client.call("kernels", weight_format=weight_format, variants=variants, quick=request.quick)
            except SideError:
                client.close()
                client = None
                found += [_alone(weight_format, variant, request.quick) for variant in variants]
            watcher.done()
    finally:
        if client is not None:
            client.close()
    return found


def _alone(weight_format: str, variant: str, quick: bool) -> dict:
    """A format on one instruction set in a process of its own, once that of all has failed."""
    found = _asked("kernels", weight_format=weight_format, variants=[variant], quick=quick)
    return found[0] if isinstance(found, list) else {"format": weight_format, "variant": variant, **found}


def _asked(call: str, **arguments) -> dict | list:
    try:
        with _client() as client:
            return client.call(call, **arguments)
    except SideError as error:
        return {"failures": [str(error)]}


def _client() -> Client:
    return Client(SIDE, environment=_ENVIRONMENT)

"""``kt bench serve``: whole models. The demo model on our engine, on stock transformers and on llama.cpp in turns; what
the engine costs beside its kernels; and how much of the memory's bandwidth a large model reaches.

Ratios are medians over rounds in which every side has its turn.
"""

import json
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TypeVar

import kt_kernel
from kt_kernel.bench import llamacpp_build, synthetic
from kt_kernel.bench.client import Client
from kt_kernel.bench.errors import BenchError, SideError, need_engine
from kt_kernel.bench.progress import Progress
from kt_kernel.bench.run import Findings
from kt_kernel.machine import system

BATCHES = (1, 16)
PROMPT_TOKENS, PREFILL_TOKENS = 32, 512
CONTEXT = 1024
_SLOTS = max(BATCHES)

METHOD, LINEARS = "AMXINT8", "int8"  # against Q8_0
_GGUF_TYPE = "q8_0"
LARGE_METHOD = "INT4G"
# What a packed weight of LARGE_METHOD takes at most, and a weight of the others in bf16: to see how many layers fit.
_LARGE_BYTES, _OTHER_BYTES = 0.55, 2.0

Name = TypeVar("Name")

PARTS = ("demo", "http", "overhead", "large", "latent")
LATENT_PROMPTS = (PROMPT_TOKENS, 512)


@dataclass(frozen=True)
class ServeSettings:
    threads: int | None = None
    rounds: int = 5
    steps: int = 48  # tokens of each sequence in a round
    parts: tuple[str, ...] = PARTS
    layers: int | None = None  # of the large model; None: what memory allows
    memory_bytes: int = 20_000_000_000  # for the large model

    @property
    def used_threads(self) -> int:
        return self.threads or system.physical_cores()

    @property
    def points(self) -> int:
        return len(self.parts)


def measure_serve(settings: ServeSettings, findings: Findings, progress: Progress) -> None:
    from kt_kernel.demo import DemoError, demo_model

    need_engine()
    try:
        demo = demo_model(say=progress.say)
    except DemoError as error:
        raise BenchError(str(error)) from None
    measures: dict[str, Callable] = {"demo": _demo, "http": _http, "overhead": _overhead, "large": _large}
    measures["latent"] = _latent
    for part in settings.parts:
        progress.say(part)
        try:
            with tempfile.TemporaryDirectory() as work:
                measures[part](settings, findings, progress, demo, Path(work))
        except SideError as error:
            findings.fail(f"{part}: {error}")
        progress.done()


def figure(model: str, phase: str, batch: int, method: str, settings: ServeSettings, **values: object) -> dict:
    return {
        "part": "serve",
        "variant": kt_kernel.__cpu_variant__,
        "model": model,
        "phase": phase,
        "batch": batch,
        "method": method,
        "threads": settings.used_threads,
        **values,
    }


def in_turns(sides: dict[Name, Callable[[int], float]], rounds: int) -> dict[Name, list[float]]:
    """Rates of each side, one of each round; the first round warms up and does not count."""
    rates: dict[Name, list[float]] = {name: [] for name in sides}
    for round_idx in range(rounds + 1):
        for name, measure in sides.items():
            rate = measure(round_idx)
            if round_idx:
                rates[name].append(rate)
    return rates


def compared(rates: dict[str, list[float]], ours: str = "engine") -> dict[str, object]:
    """Medians, and the medians of our share of each round's others."""
    values: dict[str, object] = {"tokens_per_s": round(median(rates[ours]), 2)}
    for name, theirs in rates.items():
        if name != ours:
            values[f"{name}_tokens_per_s"] = round(median(theirs), 2)
            ratios = [mine / other for mine, other in zip(rates[ours], theirs, strict=True)]
            values[f"vs_{name}"] = round(median(ratios), 3)
    return values


def _demo(settings: ServeSettings, findings: Findings, progress: Progress, demo: Path, work: Path) -> None:
    with ExitStack() as stack:
        clients = {"engine": stack.enter_context(Client("engine")), "stock": stack.enter_context(Client("stock"))}
        decoders = {
            "engine": clients["engine"].call(
                "open",
                path=str(demo),
                method=METHOD,
                linears=LINEARS,
                threads=settings.used_threads,
                slots=_SLOTS,
                context=CONTEXT,
            )["decoder"],
            "stock": clients["stock"].call("open", path=str(demo), threads=settings.used_threads)["decoder"],
        }
        try:
            clients["llamacpp"], decoders["llamacpp"] = _open_llamacpp(settings, progress, demo, work, stack)
        except BenchError as error:
            findings.fail(f"llama.cpp was not measured: {error}")
        for name, decoder in decoders.items():
            findings.note(f"{name} decodes by {decoder}")
        progress.say(f"decode of {' and '.join(map(str, BATCHES))}")
        _add_decodes(settings, findings, clients, decoders["engine"])
        progress.say("prefill")
        rates = in_turns(_prefills(clients.items()), settings.rounds)
        findings.figures.append(figure("demo", f"prefill {PREFILL_TOKENS}", 1, METHOD, settings, **compared(rates)))


def _add_decodes(settings: ServeSettings, findings: Findings, clients: dict[str, Client], decoder: str) -> None:
    """Every side with every batch in each round."""
    turns = {
        (name, batch): measure
        for batch in BATCHES
        for name, measure in _decodes(clients.items(), batch, settings.steps).items()
    }
    rates = in_turns(turns, settings.rounds)
    for batch in BATCHES:
        values = compared({name: rates[name, batch] for name in clients})
        alone = zip(rates["engine", batch], rates["engine", BATCHES[0]], strict=True)
        values["vs_batch_1"] = round(median(many / one for many, one in alone), 3)
        findings.figures.append(figure("demo", "decode", batch, METHOD, settings, decoder=decoder, **values))


def _open_llamacpp(
    settings: ServeSettings, progress: Progress, demo: Path, work: Path, stack: ExitStack
) -> tuple[Client, str]:
    from kt_kernel.demo.copies import write_gguf

    folder = llamacpp_build.build_model(progress.say)
    progress.say(f"writing the demo model as GGUF, {_GGUF_TYPE}")
    path = write_gguf(demo, work / "demo.gguf", _GGUF_TYPE)
    client = stack.enter_context(
        Client("llamacpp_model", str(folder), llamacpp_build.module_of(kt_kernel.__cpu_variant__))
    )
    sizes = {"threads": settings.used_threads, "sequences": _SLOTS, "context": CONTEXT, "batch": PREFILL_TOKENS}
    opened = client.call("open", path=str(path), vocabulary=_vocabulary(demo), **sizes)
    return client, f"{opened['decoder']}, {_GGUF_TYPE} of the same MoE"


def _decodes(clients: Iterable[tuple[str, Client]], batch: int, steps: int) -> dict[str, Callable[[int], float]]:
    def decode(client: Client) -> Callable[[int], float]:
        arguments = {"batch": batch, "prompt_tokens": PROMPT_TOKENS, "steps": steps}
        return lambda seed: client.call("decode", seed=seed, **arguments)["tokens_per_s"]

    return {name: decode(client) for name, client in clients}


def _prefills(clients: Iterable[tuple[str, Client]]) -> dict[str, Callable[[int], float]]:
    def prefill(client: Client) -> Callable[[int], float]:
        return lambda seed: PREFILL_TOKENS / client.call("prefill", seed=seed + 100, tokens=PREFILL_TOKENS)["seconds"]

    return {name: prefill(client) for name, client in clients}


def _vocabulary(path: Path) -> int:
    return json.loads((path / "config.json").read_text())["vocab_size"]


def _http(settings: ServeSettings, findings: Findings, progress: Progress, demo: Path, work: Path) -> None:
    """The same engine by itself and behind the server."""
    arguments = {"path": str(demo), "method": METHOD, "threads": settings.used_threads, "slots": _SLOTS}
    with Client("engine") as engine, Client("http") as http:
        engine.call("open", context=CONTEXT, **arguments)
        http.call("open", context=CONTEXT, vocabulary=_vocabulary(demo), **arguments)
        try:
            for batch in BATCHES:
                progress.say(f"over HTTP, decode of {batch}")
                sides = _decodes([("engine", engine), ("http", http)], batch, settings.steps)
                values = compared(in_turns(sides, settings.rounds), "http")
                findings.figures.append(figure("demo", "decode over HTTP", batch, METHOD, settings, **values))
        finally:
            http.call("close")


def _overhead(settings: ServeSettings, findings: Findings, progress: Progress, demo: Path, work: Path) -> None:
    """A model with the layers of a large one and next to no weights: what is left is the engine."""
    model = synthetic.TINY_48
    path = synthetic.write_checkpoint(model, work / "tiny", demo)
    with Client("engine") as client:
        opened = client.call(
            "open", path=str(path), method="BF16", threads=settings.used_threads, slots=1, context=CONTEXT
        )
        client.call("fill_random")
        sides = _decodes([("engine", client)], 1, settings.steps)
        rates = in_turns(sides, settings.rounds)["engine"]
        experts_us = median(client.call("experts_us", seconds=0.5)["us"])
    token_us = 1e6 / median(rates)
    findings.figures.append(
        figure(
            f"{model.layers} layers of hidden {model.hidden}",
            "overhead",
            1,
            "BF16",
            settings,
            decoder=opened["decoder"],
            tokens_per_s=round(median(rates), 2),
            token_us=round(token_us, 1),
            experts_us=round(experts_us, 1),
            overhead_us=round(token_us - experts_us, 1),
        )
    )


def layers_that_fit(model: synthetic.Qwen3Moe | synthetic.DeepseekV2, memory_bytes: int) -> int:
    ends = _OTHER_BYTES * 2 * model.vocabulary * model.hidden
    each = _LARGE_BYTES * model.expert_weights + _OTHER_BYTES * model.other_weights
    return max(0, min(model.layers, int((memory_bytes - ends) / each)))


def _write_fitting(
    settings: ServeSettings, full: synthetic.Qwen3Moe | synthetic.DeepseekV2, name: str, folder: Path, demo: Path
) -> tuple[Path, str]:
    """As many layers as memory allows; what the model is called then."""
    memory = min(settings.memory_bytes, int(0.9 * system.available_bytes()))
    layers = min(settings.layers, full.layers) if settings.layers else layers_that_fit(full, memory)
    if not layers:
        raise SideError(f"not a layer of {name} fits into {memory / 1e9:.1f} GB")
    path = synthetic.write_checkpoint(replace(full, layers=layers), folder, demo)
    return path, f"{name}, {layers} of {full.layers} layers"


def _latent(settings: ServeSettings, findings: Findings, progress: Progress, demo: Path, work: Path) -> None:
    """A model with MLA: the native decoder and transformers' forward over the same kernels and the same cache."""
    path, name = _write_fitting(settings, synthetic.DEEPSEEK_V2_LITE, "deepseek-v2-lite", work / "latent", demo)
    with Client("engine") as client:
        progress.say(f"{name}: packing")
        arguments = {"threads": settings.used_threads, "slots": 1, "context": CONTEXT}
        opened = client.call("open", path=str(path), method=LARGE_METHOD, **arguments)
        client.call("fill_random")

        def decode(native: bool, prompt_tokens: int) -> Callable[[int], float]:
            def measure(seed: int) -> float:
                client.call("decode_by", native=native)
                sizes = {"batch": 1, "prompt_tokens": prompt_tokens, "steps": settings.steps}
                return client.call("decode", seed=seed, **sizes)["tokens_per_s"]

            return measure

        for prompt_tokens in LATENT_PROMPTS:
            progress.say(f"{name}: decode behind {prompt_tokens} tokens")
            sides = {"engine": decode(True, prompt_tokens), "transformers": decode(False, prompt_tokens)}
            values = compared(in_turns(sides, settings.rounds))
            phase = f"decode behind {prompt_tokens} tokens"
            findings.figures.append(figure(name, phase, 1, LARGE_METHOD, settings, decoder=opened["decoder"], **values))


def _large(settings: ServeSettings, findings: Findings, progress: Progress, demo: Path, work: Path) -> None:
    path, name = _write_fitting(settings, synthetic.QWEN3_30B, "qwen3-30b", work / "large", demo)
    with Client("engine") as client:
        progress.say(f"{name}: packing")
        arguments = {"threads": settings.used_threads, "slots": 1, "context": CONTEXT}
        opened = client.call("open", path=str(path), method=LARGE_METHOD, **arguments)
        client.call("fill_random")
        token_bytes = client.call("token_bytes")
        total = token_bytes["experts"] + token_bytes["others"]
        progress.say(f"{name}: decode")
        decode = _decodes([("engine", client)], 1, settings.steps)["engine"]
        rates, shares = [], []
        for seed in range(settings.rounds + 1):
            read_gbps = client.call("read_gbps", threads=settings.used_threads, seconds=0.5)["read_gbps"]
            rate = decode(seed)
            if seed:
                rates.append(rate)
                shares.append(rate * total / (read_gbps * 1e9))
    findings.figures.append(
        figure(
            name,
            "decode",
            1,
            LARGE_METHOD,
            settings,
            decoder=opened["decoder"],
            tokens_per_s=round(median(rates), 2),
            expert_bytes=token_bytes["experts"],
            other_bytes=token_bytes["others"],
            read_share=round(median(shares), 4),
        )
    )

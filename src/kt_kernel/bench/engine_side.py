"""Our engine inside its own process: requests as the server makes them, timed from outside."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kt_kernel import KTMoEWrapper, _core
from kt_kernel.bench import layer
from kt_kernel.bench.prompts import prompt
from kt_kernel.bench.timing import sample
from kt_kernel.engine.api import Event, Request, Sampling


@dataclass
class _Run:
    """Requests of one measurement; events come on the engine's thread."""

    count: int
    tokens_so_far: Callable[[], int]
    submitted: float = field(default_factory=time.perf_counter)
    started: set[int] = field(default_factory=set)
    finished: int = 0
    begin: tuple[float, int] | None = None  # all run: time, tokens
    end: tuple[float, int] | None = None  # the first has ended
    error: str | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def event(self, index: int, event: Event) -> None:
        now = (time.perf_counter(), self.tokens_so_far())
        self.started.add(index)
        if self.begin is None and len(self.started) == self.count:
            self.begin = now
        if event.finish is not None:
            self.end = self.end or now
            self.error = self.error or event.error
            self.finished += 1
            if self.finished == self.count:
                self.done.set()


class EngineSide:
    """Answers the requests of ``client``; every public method is one."""

    def __init__(self) -> None:
        self._engine = None

    def open(self, path: str, method: str, threads: int, slots: int, context: int, linears: str = "auto") -> dict:
        from kt_kernel.engine.load import open_engine

        sizes = {"threads": threads, "slots": slots, "context": context}
        self._engine = open_engine(path, method=method, linears=linears, **sizes)
        return {"decoder": self._engine.forward.decoder}

    def fill_random(self) -> dict:
        """Random weights in every layer of experts: the files of a synthetic model hold none."""
        for seed, wrapper in enumerate(self._wrappers()):
            wrapper.moe.fill_random(seed)
        return {}

    def decode_by(self, native: bool) -> dict:
        """Whether the native decoder, where there is one, or transformers' forward decodes from now on."""
        self._engine.forward.decode_by(native)
        return {}

    def prefill(self, seed: int, tokens: int) -> dict:
        run = self._submit(seed, 1, tokens, 1)
        return {"seconds": run.end[0] - run.submitted}

    def decode(self, seed: int, batch: int, prompt_tokens: int, steps: int) -> dict:
        """Tokens per second while `batch` requests run, for about `steps` tokens of each."""
        run = self._submit(seed, batch, prompt_tokens, steps + batch)
        (begin, first), (end, last) = run.begin, run.end
        if last == first:
            raise RuntimeError(f"the engine gave no text before the last of {steps} tokens")
        return {"tokens_per_s": (last - first) / (end - begin)}

    def token_bytes(self) -> dict:
        """What a token reads at least: its experts, every other matrix; of the embedding one row."""
        model = self._engine.forward.model
        experts = sum(w.num_experts_per_tok * w.moe.packed_bytes_per_expert for w in self._wrappers())
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
        others = sum(p.nbytes for p in model.parameters())
        if embedding is not getattr(head, "weight", None):
            others -= embedding.nbytes
        linear = getattr(_core, "Linear", ())
        packed = {id(part): part for module in model.modules() for part in _parts(module) if isinstance(part, linear)}
        return {"experts": experts, "others": others + sum(part.packed_bytes for part in packed.values())}

    def read_gbps(self, threads: int, seconds: float) -> dict:
        return {"read_gbps": _core.measure_read_bandwidth(layer.open_pool(threads), 1.0, seconds)}

    def experts_us(self, seconds: float) -> dict:
        """Of one token through the layers of experts, one after the other, without anything between them."""
        import torch

        wrappers = self._wrappers()
        layers = [wrapper.moe for wrapper in wrappers]
        hidden, top_k = wrappers[0].hidden_size, wrappers[0].num_experts_per_tok
        rows, out = torch.zeros(1, hidden, dtype=torch.bfloat16), torch.empty(1, hidden, dtype=torch.bfloat16)
        ids, weights = torch.arange(top_k), torch.ones(top_k)
        addresses = [tensor.data_ptr() for tensor in (ids, weights, rows, out)]

        def token(_: int) -> None:
            for moe in layers:
                moe.forward(1, *addresses, id_bytes=8)

        return {"us": sample(token, seconds)}

    def _wrappers(self) -> list[KTMoEWrapper]:
        modules = self._engine.forward.model.modules()
        return [module.kt_layer.wrapper for module in modules if hasattr(module, "kt_layer")]

    def _submit(self, seed: int, batch: int, prompt_tokens: int, tokens: int) -> _Run:
        engine = self._engine
        run = _Run(batch, lambda: engine.stats().completion_tokens)
        for index in range(batch):
            request = Request(
                prompt=tuple(prompt(seed, index, prompt_tokens, engine.vocabulary_size)),
                max_tokens=tokens,
                sampling=Sampling(temperature=0.0),
                ignore_eos=True,
                special_text=True,  # random weights give any token; without text there would be no event
            )
            engine.submit(request, lambda event, index=index: run.event(index, event))
        run.done.wait()
        if run.error:
            raise RuntimeError(run.error)
        return run


def _parts(module) -> list[object]:
    """What a module holds, one list deep."""
    held = list(vars(module).values())
    return [*held, *(part for value in held if isinstance(value, (list, tuple)) for part in value)]

"""One SGLang engine in a process of its own: answers the calls of ``engines.Engine``, one line of JSON each.

    python side.py '{"model_path": ..., "kt_method": ...}'     arguments of the engine

Only this file imports sglang, so whatever engine and kt_kernel the process finds are the ones measured.
"""

import asyncio
import gzip
import inspect
import json
import os
import random
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

# Stock SGLang and the fork call some things differently; what the fork lacks altogether only matters in the newer one.
FORK_NAMES = {"cuda_graph_bs_decode": "cuda_graph_bs"}
STOCK_ONLY = {"disable_prefill_cuda_graph", "mm_feature_transport"}
_VOCABULARY = 4000  # ids that each of our models has
_PROMPT = 16  # tokens before a timed decode
_SETTLED = 0.2  # share of a trace that is left out: the prompt, and the first steps
_GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}


def engine_arguments(given: dict) -> dict:
    from sglang.srt.server_args import ServerArgs

    known = inspect.signature(ServerArgs).parameters
    named = {name if name in known else FORK_NAMES.get(name, name): value for name, value in given.items()}
    return {name: value for name, value in named.items() if name in known or name not in STOCK_ONLY}


class Side:
    """Every public method is a call."""

    def __init__(self, given: dict):
        import sglang

        self._engine = sglang.Engine(**engine_arguments(given))
        self._random = random.Random(0)

    def about(self) -> dict:
        import sglang
        import torch

        found = {"sglang": sglang.__version__, "torch": torch.__version__}
        if torch.cuda.is_available():
            found["gpu"] = torch.cuda.get_device_name()
        with suppress(ImportError):
            import kt_kernel

            found |= {"kt_kernel": kt_kernel.__version__, "variant": kt_kernel.__cpu_variant__}
        found["plugin"] = "kt_kernel.integrations.sglang" in sys.modules
        return found

    # Is it right

    def greedy(self, rows: list[dict]) -> list[dict]:
        """Prompt by prompt: the greedy tokens and their log-probs."""
        return [_tokens(self._generate(row["prompt_ids"], len(row["output_ids"]))) for row in rows]

    def forced(self, rows: list[dict]) -> list[list[float]]:
        """Log-probs of the given outputs as input: all can be compared, also behind a token that differs."""
        found = []
        for row in rows:
            ids = row["prompt_ids"] + row["output_ids"]
            answer = self._generate(ids, 1, logprob_start_len=0)
            found.append([entry[0] for entry in answer["meta_info"]["input_token_logprobs"][-len(row["output_ids"]) :]])
        return found

    def together(self, rows: list[dict], cancel_after: int, most: int) -> dict:
        """All prompts at once, beside one of up to `most` tokens that is cancelled after `cancel_after` of them."""
        return self._engine.loop.run_until_complete(self._together(rows, cancel_after, most))

    async def _together(self, rows: list[dict], cancel_after: int, most: int) -> dict:
        engine = self._engine

        async def whole(row: dict) -> dict:
            answer = await engine.async_generate(
                input_ids=row["prompt_ids"],
                sampling_params=_greedy(len(row["output_ids"])),
                return_logprob=True,
            )
            return _tokens(answer)

        async def cancelled() -> dict:
            stream = await engine.async_generate(
                input_ids=rows[0]["prompt_ids"], sampling_params=_greedy(most), stream=True, rid="to-be-cancelled"
            )
            seen, reason = 0, None
            async for answer in stream:
                seen, reason = answer["meta_info"]["completion_tokens"], answer["meta_info"]["finish_reason"]
                if seen >= cancel_after:
                    engine.tokenizer_manager.abort_request(rid="to-be-cancelled")
            return {"tokens": seen, "finish": (reason or {}).get("type")}

        gone, *answers = await asyncio.gather(cancelled(), *(whole(row) for row in rows))
        return {"cancelled": gone, "answers": answers}

    def record_experts(self, what: str) -> None:
        """start, stop or dump of the engine's own recorder of expert distributions."""
        getattr(self._engine, f"{what}_expert_distribution_record")()

    # How fast is it

    def decode(self, batch: int, tokens: int) -> float:
        """New tokens per second of `batch` sequences, without the time of their prompts."""
        prompts = [self._prompt(_PROMPT) for _ in range(batch)]
        first = self._seconds(prompts, 1)
        return batch * tokens / (self._seconds(prompts, tokens + 1) - first)

    def prefill(self, tokens: int) -> float:
        """Seconds until the first token after a prompt."""
        return self._seconds([self._prompt(tokens)], 1)

    def idle(self, batch: int, tokens: int) -> float:
        """Share of the time in a decode in which the GPU does nothing, from the engine's own profiler."""
        with tempfile.TemporaryDirectory() as folder:
            self._engine.start_profile(output_dir=folder, activities=["GPU"], with_stack=False, record_shapes=False)
            self._seconds([self._prompt(_PROMPT) for _ in range(batch)], tokens)
            self._engine.stop_profile()
            traces = sorted(Path(folder).rglob("*.gz"))
            if not traces:
                raise RuntimeError("the profiler wrote no trace")
            with gzip.open(traces[0], "rt") as file:
                events = json.load(file)["traceEvents"]
        return idle_share([(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in _GPU_WORK])

    def stop(self) -> None:
        self._engine.shutdown()

    def _prompt(self, tokens: int) -> list[int]:
        """New ones every time: experts of different tokens differ, and no cache helps."""
        return [self._random.randrange(_VOCABULARY) for _ in range(tokens)]

    def _seconds(self, prompts: list[list[int]], tokens: int) -> float:
        start = time.perf_counter()
        self._engine.generate(input_ids=prompts, sampling_params=_greedy(tokens))
        return time.perf_counter() - start

    def _generate(self, ids: list[int], tokens: int, **options) -> dict:
        return self._engine.generate(input_ids=ids, sampling_params=_greedy(tokens), return_logprob=True, **options)


def idle_share(spans: list[tuple[float, float]]) -> float:
    """Of the time from the first to the last of the spans, begin and end, what none of them covers."""
    if not spans:
        raise RuntimeError("the trace holds no work of a GPU")
    first, last = min(begin for begin, _ in spans), max(end for _, end in spans)
    first += _SETTLED * (last - first)
    busy, reached = 0.0, first
    for begin, end in sorted(spans):
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return 1 - busy / (last - first)


def _greedy(tokens: int) -> dict:
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}


def _tokens(answer: dict) -> dict:
    entries = answer["meta_info"]["output_token_logprobs"]
    return {"ids": [entry[1] for entry in entries], "logprobs": [entry[0] for entry in entries]}


def main() -> None:
    # Whatever the engine and its children print goes to the log; this file alone answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**content) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        side = Side(json.loads(sys.argv[1]))
        answer(ok=side.about())
    except Exception as error:
        traceback.print_exc()
        answer(error=f"{type(error).__name__}: {error}")
        return
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer(ok=getattr(side, request["call"])(**request["arguments"]))
        except Exception as error:
            traceback.print_exc()
            answer(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()

"""Stock transformers inside its own process: bf16, experts by grouped_mm, a loop of forwards over its own cache."""

import time

from kt_kernel.bench.prompts import prompt


class StockSide:
    """Answers the requests of ``client``; every public method is one."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._model = None

    def open(self, path: str, threads: int) -> dict:
        from transformers import AutoModelForCausalLM

        self._torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=self._torch.bfloat16, experts_implementation="grouped_mm", local_files_only=True
        )
        return {"decoder": f"transformers, {self._model.config._experts_implementation}"}

    def prefill(self, seed: int, tokens: int) -> dict:
        start = time.perf_counter()
        self._forward(self._prompts(seed, 1, tokens), None)
        return {"seconds": time.perf_counter() - start}

    def decode(self, seed: int, batch: int, prompt_tokens: int, steps: int) -> dict:
        tokens, cache = self._forward(self._prompts(seed, batch, prompt_tokens), None)
        start = time.perf_counter()
        for _ in range(steps):
            tokens, cache = self._forward(tokens, cache)
        return {"tokens_per_s": batch * steps / (time.perf_counter() - start)}

    def _prompts(self, seed: int, batch: int, tokens: int):
        vocabulary = self._model.config.vocab_size
        return self._torch.tensor([prompt(seed, index, tokens, vocabulary) for index in range(batch)])

    def _forward(self, tokens, cache):
        """The most likely next token of each row, and the cache."""
        with self._torch.inference_mode():
            output = self._model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].argmax(-1, keepdim=True), output.past_key_values

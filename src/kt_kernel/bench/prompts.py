"""Prompts of random tokens: every side gets the same ones, and none finds its prompt in a cache."""

import numpy as np

_FIRST_PLAIN = 256  # special tokens are below, in the models that are measured


def prompt(seed: int, index: int, tokens: int, vocabulary: int) -> list[int]:
    low = min(_FIRST_PLAIN, vocabulary // 2)
    return np.random.default_rng([seed, index]).integers(low, vocabulary, tokens).tolist()

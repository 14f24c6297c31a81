"""The sampler against a slow reference, by its distribution and by time."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest

from kt_kernel.engine.api import RequestError, Sampling
from kt_kernel.engine.sampling import Sampler, _nucleus, check, log_probabilities

VOCABULARY = 50

FILTERS = {
    "none": Sampling(),
    "cold": Sampling(temperature=0.4),
    "hot": Sampling(temperature=3.0),
    "top_k": Sampling(top_k=5),
    "top_p": Sampling(top_p=0.7),
    "min_p": Sampling(min_p=0.1),
    "all": Sampling(temperature=1.7, top_k=12, top_p=0.9, min_p=0.05),
    "repetition": Sampling(repetition_penalty=1.8),
    "counts": Sampling(presence_penalty=0.7, frequency_penalty=0.4),
    "bias": Sampling(logit_bias={3: 4.0, 7: -100.0, 11: 1.5}),
    "everything": Sampling(
        temperature=0.8,
        top_k=20,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.3,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        logit_bias={1: 2.0},
    ),
}


def reference_probabilities(logits: np.ndarray, options: Sampling, prompt: list[int], answer: list[int]) -> np.ndarray:
    """The file comment of sampling.py, one token at a time, in f64."""
    z = [float(value) for value in logits]
    for token, bias in options.logit_bias.items():
        z[token] += bias
    for token in set(prompt) | set(answer):
        z[token] = z[token] / options.repetition_penalty if z[token] > 0 else z[token] * options.repetition_penalty
    for token in set(answer):
        z[token] -= options.frequency_penalty * answer.count(token) + options.presence_penalty
    z = [value / options.temperature for value in z]
    order = sorted(range(len(z)), key=lambda token: -z[token])
    if options.top_k:
        order = order[: options.top_k]
    p = {token: math.exp(z[token] - z[order[0]]) for token in order}
    if options.top_p < 1:
        kept, mass = [], 0.0
        for token in order:
            kept.append(token)
            mass += p[token] / sum(p.values())
            if mass >= options.top_p:
                break
        order = kept
    order = [token for token in order if p[token] >= options.min_p]
    total = sum(p[token] for token in order)
    return np.array([p[token] / total if token in order else 0.0 for token in range(len(z))])


def logits_of(seed: int, size: int = VOCABULARY, spread: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, size).astype(np.float32)


def answered(options: Sampling, prompt: list[int], answer: list[int]) -> Sampler:
    sampler = Sampler(options, prompt)
    sampler.counts.update(answer)
    return sampler


@pytest.mark.parametrize("name", FILTERS)
def test_tokens_are_drawn_with_the_reference_probabilities(name):
    """Chi-square over 4,000 draws: four standard deviations above its mean, chance alone hardly ever is."""
    options = replace(FILTERS[name], seed=7)
    prompt, answer, draws = [1, 2, 3, 3], [4, 4, 4, 5], 4000
    logits = logits_of(len(name))
    untouched = logits.copy()
    expected = reference_probabilities(logits, options, prompt, answer) * draws
    sampler = answered(options, prompt, answer)
    counts = np.zeros(VOCABULARY)
    for _ in range(draws):
        counts[sampler.sample(logits)] += 1
        sampler.counts.clear()
        sampler.counts.update(answer)
    assert (logits == untouched).all()
    assert counts[expected == 0].sum() == 0
    rare = expected < 5
    pairs = [*zip(counts[~rare], expected[~rare], strict=True), (counts[rare].sum(), expected[rare].sum())]
    chi_square = sum((count - mean) ** 2 / mean for count, mean in pairs if mean > 1)
    freedom = max(len(pairs) - 1, 1)
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 4


def test_another_distribution_is_noticed():
    """The control: the same measure, with probabilities of another temperature."""
    logits, draws = logits_of(1), 4000
    expected = reference_probabilities(logits, Sampling(temperature=1.15), [], []) * draws
    sampler = Sampler(Sampling(seed=7), [])
    counts = np.bincount([sampler.sample(logits) for _ in range(draws)], minlength=VOCABULARY)
    often = expected >= 5
    chi_square = ((counts - expected)[often] ** 2 / expected[often]).sum()
    assert chi_square > often.sum() + 4 * math.sqrt(2 * often.sum()) + 4


@pytest.mark.parametrize("size", [1, 2, 511, 512, 513, 5000])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_what_is_never_drawn_is_what_the_reference_leaves_out(size, spread):
    """Sizes around the blocks of the draw; all equal, usual, and so peaked that most are 0."""
    logits = logits_of(size, size, spread)
    for options in (Sampling(seed=1), Sampling(top_p=0.5, seed=1), Sampling(top_p=0.999, top_k=600, seed=1)):
        possible = reference_probabilities(logits, options, [], []) > 0
        sampler = Sampler(options, [])
        drawn = {sampler.sample(logits) for _ in range(50)}
        if spread:  # where all are equal, which of them are inside is open
            assert possible[list(drawn)].all()
        assert len(drawn) <= possible.sum()


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.9999, 1 - 1e-12])
@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0, 8.0])
def test_top_p_keeps_the_fewest_that_are_enough(top_p, spread):
    z = logits_of(3, 3000, spread)
    z -= z.max()
    p = np.exp(z)
    kept = _nucleus(z, p, top_p)
    assert len(set(kept.tolist())) == len(kept)
    assert sorted(p[kept]) == sorted(np.sort(p)[len(p) - len(kept) :])  # the largest
    mass, total = p[kept].sum(dtype=np.float64), p.sum(dtype=np.float64)
    assert mass >= total * (top_p - 1e-14)
    assert mass - p[kept].min() < total * (top_p + 1e-14)  # and no more of them than it takes


def test_temperature_0_is_the_most_likely_token_after_penalties():
    logits = np.array([1.0, 3.0, 2.5], np.float32)
    assert Sampler(Sampling(temperature=0), []).sample(logits) == 1
    assert Sampler(Sampling(temperature=0, logit_bias={0: 3}), []).sample(logits) == 0
    assert Sampler(Sampling(temperature=0, repetition_penalty=2.0), [1]).sample(logits) == 2
    sampler = Sampler(Sampling(temperature=0, presence_penalty=1.0), [])
    assert [sampler.sample(logits) for _ in range(3)] == [1, 2, 1]
    assert Sampler(Sampling(temperature=1e-40, seed=1), []).sample(logits) == 1


def test_a_seed_gives_the_same_tokens_again():
    logits = logits_of(1)

    def tokens(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(temperature=2.0, seed=seed), [])
        return [sampler.sample(logits) for _ in range(30)]

    assert tokens(5) == tokens(5)
    assert tokens(5) != tokens(6)
    assert tokens(-1) == tokens(2**64 - 1)  # clients send any integer
    assert tokens(None) != tokens(None)


def test_logits_that_are_no_numbers_are_an_error():
    for bad in (np.nan, np.inf):
        logits = logits_of(1)
        logits[17] = bad
        for options in (Sampling(temperature=0), Sampling(), Sampling(top_k=3)):
            with pytest.raises(ValueError, match=r"the model's logits are not finite: (nan|inf) of token 17"):
                Sampler(options, []).sample(logits)
    with pytest.raises(ValueError, match="not finite: -inf"):
        Sampler(Sampling(), []).sample(np.full(5, -np.inf, np.float32))


def test_minus_infinity_forbids_a_token():
    logits = logits_of(1)
    logits[:45] = -np.inf
    for options in (Sampling(), Sampling(top_p=0.99), Sampling(top_k=49), Sampling(min_p=1e-9)):
        sampler = Sampler(replace(options, seed=1), [])
        assert min(sampler.sample(logits) for _ in range(100)) >= 45


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Sampling(temperature=-0.1), "temperature is -0.1: it must be at least 0"),
        (Sampling(temperature=math.nan), "temperature is nan"),
        (Sampling(top_p=0.0), "top_p is 0.0: it must be above 0 and at most 1"),
        (Sampling(top_p=1.1), "top_p is 1.1"),
        (Sampling(top_k=-1), "top_k is -1: it must be at least 0"),
        (Sampling(min_p=1.5), "min_p is 1.5: it must be at least 0 and at most 1"),
        (Sampling(repetition_penalty=0.0), "repetition_penalty is 0.0: it must be above 0"),
        (Sampling(frequency_penalty=math.inf), "frequency_penalty is inf: it must be a finite number"),
        (Sampling(logit_bias={50: 1.0}), "logit_bias names token 50: the vocabulary has 50"),
        (Sampling(logit_bias={5: math.nan}), "logit_bias of token 5 is nan"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(RequestError, match=message):
        check(options, VOCABULARY)


def test_log_probabilities_are_those_of_the_logits_as_they_are():
    logits = logits_of(1)
    z = logits.astype(np.float64)
    expected = z - np.log(np.exp(z).sum())
    own, top = log_probabilities(logits, 7, 4)
    assert own == pytest.approx(expected[7], abs=1e-5)
    assert [token for token, _ in top] == np.argsort(-z)[:4].tolist()
    assert [value for _, value in top] == pytest.approx(np.sort(expected)[::-1][:4], abs=1e-5)
    assert log_probabilities(logits, 7, 0)[1] == []
    assert len(log_probabilities(logits, 7, 99)[1]) == VOCABULARY


def test_a_vocabulary_of_150000_takes_little_time():
    """Figures are those of a free core of Zen 4; the limit is wide because machines of tests are busy."""
    logits = logits_of(1, 151_936)
    logits[:40] += 14  # as peaked as text is
    limits_ms = {"greedy": 0.05, "plain": 0.3, "usual": 0.6}  # 0.01, 0.15, 0.3 ms
    cases = {
        "greedy": Sampling(temperature=0),
        "plain": Sampling(seed=1),
        "usual": Sampling(temperature=0.7, top_k=20, top_p=0.8, min_p=0.01, seed=1),
    }
    for name, options in cases.items():
        sampler = Sampler(options, [])
        times = []
        for _ in range(20):
            start = time.perf_counter()
            sampler.sample(logits)
            times.append(time.perf_counter() - start)
        assert min(times) * 1e3 < 10 * limits_ms[name], name

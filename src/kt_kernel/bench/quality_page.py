"""docs/quality.md, out of the figures of ``kt bench quality --page docs/quality.md``."""

from pathlib import Path

from kt_kernel.machine import system

_HEAD = """# What quantisation costs

`kt bench quality --page docs/quality.md` wrote this page, on {cpu}, {variant}.

The model is the demo model, SmolLM2-135M-Instruct cut into 16 experts of which a token takes 8 (`kt run demo`);
everything but the experts is computed in f32. The text is the first chapter of Jane Austen's *Pride and Prejudice*
(1813), {tokens} tokens in windows of 512. The dense original, in f32 as well, has a perplexity of {dense:.3f}.

Divergence is the mean over tokens of the Kullback-Leibler divergence from the dense model, in nats. It separates
methods where perplexity, on a text of this length, moves by chance: by about 0.05 % at the divergence of BF16, by 2 %
at that of INT4G. "Same token" is how often the most likely next token is the same.

The weights of the original have 4 bits (Q4_1), so whatever rounds them again loses twice, and a small model suffers
more than a large one: the order of the rows is what carries over to other models, not the numbers.

| Method | Weights | Bytes/weight | Perplexity | Change | Divergence | Same token |
|---|---|---:|---:|---:|---:|---:|
"""


def text_of(figures: list[dict]) -> str:
    first = figures[0]
    head = _HEAD.format(
        cpu=system.cpu_model(), variant=first["variant"], tokens=first["tokens"], dense=first["dense_perplexity"]
    )
    rows = (
        f"| {f['method']} | {f['weights']} | {f['bytes_per_weight']:.2f} | {f['perplexity']:.3f} | "
        f"{100 * f['change']:+.2f} % | {f['divergence']:.4f} | {100 * f['same_token']:.1f} % |\n"
        for f in figures
    )
    return head + "".join(rows)


def write(figures: list[dict], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(figures))

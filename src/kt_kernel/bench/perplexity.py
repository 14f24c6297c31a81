"""How likely a model finds a text, and how far two models are apart on it.

The text, austen.txt, is the first chapter of Jane Austen's Pride and Prejudice (1813, in the public domain).
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TEXT = Path(__file__).with_name("austen.txt")
WINDOW = 512  # tokens that a forward sees


def windows_of(tokenizer, tokens: int | None = None) -> "list[torch.Tensor]":
    """The text, or its first tokens, as ids [1, T]."""
    ids = tokenizer(TEXT.read_text(), return_tensors="pt")["input_ids"][:, :tokens]
    return list(ids.split(WINDOW, dim=1))


def log_probabilities(model, windows: "list[torch.Tensor]") -> "list[torch.Tensor]":
    """[T - 1, vocabulary] for each window, f32: of what follows each token but the last."""
    import torch

    with torch.inference_mode():
        return [model(window).logits[0, :-1].float().log_softmax(-1) for window in windows]


def loss(windows: "list[torch.Tensor]", found: "list[torch.Tensor]") -> float:
    """Mean over tokens; perplexity is its exponential."""
    import torch

    losses = [-rows.gather(1, window[0, 1:, None]) for rows, window in zip(found, windows, strict=True)]
    return float(torch.cat(losses).double().mean())


def distance(reference: "list[torch.Tensor]", found: "list[torch.Tensor]") -> dict:
    """Mean Kullback-Leibler divergence from the reference in nats, and how often the likeliest token is the same."""
    import torch

    pairs = list(zip(reference, found, strict=True))
    divergence = torch.cat([(right.exp() * (right - other)).sum(-1) for right, other in pairs])
    same = torch.cat([right.argmax(-1) == other.argmax(-1) for right, other in pairs])
    return {"divergence": float(divergence.mean()), "same_token": float(same.float().mean())}

"""Tokens per second of the embedded engine, made of parts that were measured one by one.

A decoded token, with n layers of which m have experts, and c tokens before it:
    experts    m * (top_k experts, one row)                       products of the method's format
    linears    the layers' other matrices, one row                matrices of attention, in bf16 or --linears
    head       the output matrix, one row                         a part of it
    barriers   n * (barriers, norms, routing)                     a decoder without weights
    attention  c * (layers with keys) * (one key)                 the same decoder, far into a text
    sampling   the head's logits to a token and its text          the engine's own sampler, and 0.1 ms
A prompt is read in pieces, of the size that the engine itself would choose. A piece of t tokens meets
u = E (1 - (1 - top_k / E)^t) experts of a layer, each with t top_k / u rows; what torch computes beside the products is
measured on tensors of the model's sizes.
"""

from dataclasses import dataclass

from kt_kernel.engine.chunks import MAX_CHUNK, MIN_CHUNK
from kt_kernel.machine.decode_overhead import Heads
from kt_kernel.machine.probe import Probe
from kt_kernel.machine.products import Products
from kt_kernel.machine.torch_layer import TorchLayer
from kt_kernel.plan import sizes
from kt_kernel.registry.known import Facts

# How long running answers wait for a piece of another's prompt: open_engine's default.
STALL_S = 0.2
# Where figures are given: a short text, as most benchmarks have it.
DECODE_CONTEXT, PROMPT_TOKENS = 128, 512
# Scheduling, text and events of a token, in Python: 0.1 ms on Zen 4.
_STEP_S = 1e-4


@dataclass(frozen=True)
class Prediction:
    """Seconds by part. They follow one another, so the sum is the time."""

    tokens: int
    parts: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def decode_heads(facts: Facts) -> Heads:
    """As the native decoder attends: all heads of latent attention share one key, which is the latent."""
    if facts.mla is not None:
        return Heads(facts.heads, 1, facts.mla.kv_rank + facts.mla.rope, facts.experts, facts.top_k)
    return Heads(facts.heads, facts.kv_heads, facts.head_dim, facts.experts, facts.top_k)


def decodes_natively(facts: Facts) -> bool:
    """As the engine will decide, as far as sizes tell: layers with a state instead of keys run on transformers."""
    return facts.full_attention_every == 1


def predict_decode(
    probe: Probe, facts: Facts, weight_format: str, linears: str = "bf16", context: int = DECODE_CONTEXT
) -> Prediction:
    """One request, at the given number of tokens before the one that is decoded."""
    expert = 3 * facts.hidden * facts.moe_intermediate
    experts = probe.products(weight_format, facts.hidden, facts.moe_intermediate)
    parts = {
        "experts": facts.moe_layers * experts.seconds(1, facts.top_k * expert),
        "linears": _linears(probe, facts, linears).seconds(1, sizes.layer_weights(facts)),
        "head": _head(probe, facts, linears).seconds(1, sizes.head_weights(facts)),
    }
    if decodes_natively(facts):
        overhead = probe.decode_overhead(decode_heads(facts))
        parts["barriers"] = facts.layers * overhead.layer_us / 1e6
        parts["attention"] = sizes.kv_layers(facts) * context * overhead.key_us / 1e6
    else:
        layer = _torch_layer(probe, facts)
        parts["operations"] = facts.layers * layer.seconds(1, 0)
        parts["attention"] = sizes.kv_layers(facts) * (layer.seconds(1, context) - layer.seconds(1, 0))
    parts["sampling"] = probe.sampling_us(facts.vocab) / 1e6 + _STEP_S
    return Prediction(1, parts)


def predict_prefill(
    probe: Probe,
    facts: Facts,
    weight_format: str,
    linears: str = "bf16",
    tokens: int = PROMPT_TOKENS,
    chunk: int | None = None,
) -> Prediction:
    """One prompt, from its start, on an engine that is idle. `chunk`: the size of its pieces, if it is fixed."""
    size = chunk or chunk_size(probe, facts, weight_format, linears)
    parts: dict[str, float] = {}
    done = 0
    while done < tokens:
        piece = min(size, tokens - done)
        for name, seconds in _piece(probe, facts, weight_format, linears, piece, done).items():
            parts[name] = parts.get(name, 0.0) + seconds
        done += piece
    parts["head"] = _head(probe, facts, linears).seconds(1, sizes.head_weights(facts))
    parts["sampling"] = probe.sampling_us(facts.vocab) / 1e6 + _STEP_S
    return Prediction(tokens, parts)


def chunk_size(probe: Probe, facts: Facts, weight_format: str, linears: str) -> int:
    """The largest power of two whose piece takes no longer than others may wait."""
    size = MIN_CHUNK
    while 2 * size <= MAX_CHUNK:
        if sum(_piece(probe, facts, weight_format, linears, 2 * size, 0).values()) > STALL_S:
            break
        size *= 2
    return size


def active_experts(facts: Facts, tokens: int) -> float:
    """Of a layer, if every token takes any top_k with the same chance."""
    return facts.experts * (1 - (1 - facts.top_k / facts.experts) ** tokens)


def _piece(probe: Probe, facts: Facts, weight_format: str, linears: str, tokens: int, before: int) -> dict[str, float]:
    expert = 3 * facts.hidden * facts.moe_intermediate
    active = active_experts(facts, tokens)
    experts = probe.products(weight_format, facts.hidden, facts.moe_intermediate)
    layer = _torch_layer(probe, facts)
    attention = layer.seconds(tokens, before + tokens) - layer.seconds(tokens, 0)  # masked pairs are computed too
    return {
        "experts": facts.moe_layers * experts.seconds(tokens * facts.top_k / active, active * expert),
        "linears": _linears(probe, facts, linears).seconds(tokens, sizes.layer_weights(facts)),
        "operations": facts.layers * layer.seconds(tokens, 0),
        "attention": sizes.kv_layers(facts) * attention,
    }


def _linears(probe: Probe, facts: Facts, weight_format: str) -> Products:
    """Of a layer: those of attention stand for all."""
    return probe.linears(weight_format, sizes.attention_matrices(facts))


def _head(probe: Probe, facts: Facts, weight_format: str) -> Products:
    return probe.linears(weight_format, ((facts.vocab, facts.hidden),))


def _torch_layer(probe: Probe, facts: Facts) -> TorchLayer:
    """Prompts of latent attention have their keys and values expanded."""
    if facts.mla is None:
        return probe.torch_layer(facts.hidden, decode_heads(facts), facts.head_dim)
    heads = Heads(facts.heads, facts.heads, facts.mla.nope + facts.mla.rope, facts.experts, facts.top_k)
    return probe.torch_layer(facts.hidden, heads, facts.mla.value)

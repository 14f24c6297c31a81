"""How many weights and bytes a model has: in memory, on the disk, read for each token, kept for each token.

H hidden, I intermediate, E experts, V vocabulary, d head_dim:
    expert       3 H I
    attention    H d (heads + 2 kv_heads) + heads d H; latent: H q + q heads (nope + rope) + H (kv + rope)
                 + kv heads (nope + value) + heads value H
    router       E H
    dense layer  3 H I_dense
    both ends    V H each; a tied head is a packed copy in the embedded engine, so it counts twice there too
"""

from functools import lru_cache

from kt_kernel import _core
from kt_kernel.registry.known import Facts

BF16_BYTES = 2
# What a plan assumes of formats that keep groups of a checkpoint.
_GROUPS = {"fp8": 128, "fp8c": 0, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16, "rawint4": 32, "int4z": 128}


@lru_cache(256)
def packed_expert_bytes(weight_format: str, hidden: int, intermediate: int) -> int:
    """As a layer of this shape would report them."""
    pool = _core.Pool([1], [-1], [[]])
    layer = _core.MoELayer(
        pool,
        format=weight_format,
        num_experts=1,
        top_k=1,
        hidden_size=hidden,
        intermediate_size=intermediate,
        max_tokens=1,
        group_size=_GROUPS.get(weight_format, 0),
    )
    return layer.packed_bytes_per_expert


def bytes_per_weight(weight_format: str) -> float:
    """Without padding: of files, and of a GPU."""
    return packed_expert_bytes(weight_format, 4096, 4096) / (3 * 4096 * 4096)


def expert_bytes(facts: Facts, weight_format: str) -> int:
    """Of all routed experts in memory."""
    each = packed_expert_bytes(weight_format, facts.hidden, facts.moe_intermediate)
    return facts.moe_layers * facts.experts * each


def token_expert_bytes(facts: Facts, weight_format: str) -> int:
    """Of the experts that one token takes."""
    each = packed_expert_bytes(weight_format, facts.hidden, facts.moe_intermediate)
    return facts.moe_layers * facts.top_k * each


def attention_matrices(facts: Facts) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of each, of a layer."""
    hidden, heads = facts.hidden, facts.heads
    if facts.mla is None:
        q, kv = heads * facts.head_dim, facts.kv_heads * facts.head_dim
        return (q, hidden), (kv, hidden), (kv, hidden), (hidden, q)
    mla = facts.mla
    queries = heads * (mla.nope + mla.rope)
    from_hidden = ((mla.q_rank, hidden), (queries, mla.q_rank)) if mla.q_rank else ((queries, hidden),)
    latents = ((mla.kv_rank + mla.rope, hidden), (heads * (mla.nope + mla.value), mla.kv_rank))
    return (*from_hidden, *latents, (hidden, heads * mla.value))


def attention_weights(facts: Facts) -> int:
    """Of a layer."""
    return sum(rows * columns for rows, columns in attention_matrices(facts))


def shared_weights(facts: Facts) -> int:
    """Of the experts of a layer that every token takes."""
    return facts.shared_experts * 3 * facts.hidden * facts.moe_intermediate


def layer_weights(facts: Facts) -> int:
    """Of all layers, without routed experts: what every token reads there."""
    moe = shared_weights(facts) + facts.experts * facts.hidden
    dense = 3 * facts.hidden * facts.dense_intermediate
    return facts.layers * attention_weights(facts) + facts.moe_layers * moe + facts.dense_layers * dense


def head_weights(facts: Facts) -> int:
    return facts.vocab * facts.hidden


def other_bytes(facts: Facts, per_weight: float = BF16_BYTES) -> int:
    """In memory, of everything but routed experts: layers, head and embedding."""
    return int(per_weight * (layer_weights(facts) + head_weights(facts)) + BF16_BYTES * head_weights(facts))


def checkpoint_bytes(facts: Facts) -> int:
    """Of the files of the model, as far as its encodings tell."""
    ends = head_weights(facts) * (1 if facts.tied else 2)
    return int(
        facts.expert_weights * bytes_per_weight(facts.encoding)
        + layer_weights(facts) * bytes_per_weight(facts.rest)
        + BF16_BYTES * ends
    )


def kv_layers(facts: Facts) -> int:
    """Layers whose keys and values grow with the text."""
    return -(-facts.layers // facts.full_attention_every)


def kv_token_bytes(facts: Facts) -> int:
    """Keys and values of one token in bf16; of latent attention both engines keep the latents."""
    each = facts.mla.kv_rank + facts.mla.rope if facts.mla else 2 * facts.kv_heads * facts.head_dim
    return BF16_BYTES * kv_layers(facts) * each

"""The native decoder of a model: all layers of one token for each live request in one call of the core.

`build` takes a model apart whose experts and linears are on our kernels. What it does not know, it does not guess: it
returns the reason in words, and decoding stays with transformers. Weights are not held twice: the decoder uses the
packed experts and linears of the model's own modules, its embedding, and the keys and values of the cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

import kt_kernel
from kt_kernel import _core, runtime
from kt_kernel.engine.latents import Heads
from kt_kernel.hf.linear import KTLinear, linears_of, preferred_format, replace_linears

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kt_kernel.engine.slots import SlotCache

Decode = Callable[[Sequence[int], Sequence[int], Sequence[int]], torch.Tensor]

_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
_LATENT = {"q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "o_proj"}
_LATENT |= {"kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
# Of configs: what changes the numbers and is not read here. A model that sets one decodes with transformers.
_UNKNOWN = ("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv")


@dataclass(frozen=True)
class Family:
    """How a model type differs from a layer of norm, attention, norm, and MLP or softmax-routed experts."""

    ffn: str = "mlp"  # the attribute of a layer
    router: str = "gate"  # and of its experts' block
    kind: str = "softmax"  # or sigmoid, of the router
    renormalise: bool | None = True  # None: as norm_topk_prob says
    correction: str | None = None  # where e_score_correction_bias is: in the router or in the block
    shared: str | None = None  # an MLP beside the experts
    scalar: str | None = None  # its gate
    group_best: int | None = None  # experts are in groups, each as good as so many of its best; weights are scaled
    pairs: str | None = "halves"  # of rotary embeddings; None: "gathered" or "halves", as rope_interleave says
    windows: str = "none"  # "all": sliding_window is of every layer; "types": of those that layer_types names
    multipliers: str | None = None  # embedding, residual and logits are scaled, as "granite" or "minicpm" name it


_DENSE = Family(windows="types")
_GROUPED = Family(kind="sigmoid", renormalise=None, correction="router", shared="shared_experts", group_best=2)
_LATENTS = replace(_GROUPED, pairs=None)
FAMILIES = {
    "deepseek_v2": Family(renormalise=False, shared="shared_experts", group_best=1, pairs="neighbours"),
    "deepseek_v3": _LATENTS,
    "dots1": replace(_GROUPED, windows="types"),
    "glm4_moe": _GROUPED,
    "glm4_moe_lite": _LATENTS,
    "gpt_oss": Family(router="router", windows="types"),
    "granitemoe": Family(ffn="block_sparse_moe", router="router", multipliers="granite"),
    "llama": Family(),
    "minimax_m2": Family(kind="sigmoid", correction="block"),
    "minicpm3": Family(multipliers="minicpm"),
    "mistral": Family(windows="all"),
    "mixtral": Family(windows="all"),
    "olmoe": Family(renormalise=None),
    "qwen2": _DENSE,
    "qwen2_moe": Family(renormalise=None, shared="shared_expert", scalar="shared_expert_gate", windows="types"),
    "qwen3": _DENSE,
    "qwen3_moe": Family(renormalise=None, windows="all"),
    "youtu": Family(pairs=None),
}


class UnknownError(Exception):
    """Something about the model that the native decoder does not know; the message says what."""


def build(model: "PreTrainedModel", cache: "SlotCache") -> "Decode | str":
    """The decode call of a model over the keys and values of a cache, or the reason why there is none.

    Linears that torch still computes are packed, and replaced in the model.
    """
    try:
        return NativeDecoder(model, cache)
    except UnknownError as reason:
        return str(reason)


class NativeDecoder:
    """decode(slots, tokens, positions) -> float32 [n, vocabulary]; keys and values are written at the positions."""

    def __init__(self, model: "PreTrainedModel", cache: "SlotCache"):
        self._parts = _take_apart(model)
        self._rope = RopeTables(self._parts.rotary, cache.max_len, self._parts.dtype)
        self._cache = cache
        # Made with the first token: the cache has no tensors before a prompt.
        self._decoder: _core.Decoder | None = None

    @torch.inference_mode()
    def __call__(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        if self._decoder is None:
            self._decoder = _make_decoder(self._parts, self._cache, self._rope)
        self._rope.reach(max(positions, default=0))
        n = len(slots)
        rows = torch.tensor([*slots, *tokens, *positions], dtype=torch.int64)
        logits = torch.empty(n, self._parts.vocabulary, dtype=torch.float32)
        first = rows.data_ptr()
        self._decoder.decode(n, first, first + 8 * n, first + 16 * n, logits.data_ptr())
        return logits


class RopeTables:
    """cos and sin, f32 [max_len, rotary / 2], as the model's own module gives them, filled as far as texts reach."""

    STEP = 1024  # positions filled at a time; a call of the module takes as long as for one

    def __init__(self, rotary: nn.Module, max_len: int, dtype: torch.dtype):
        self._rotary, self._like = rotary, torch.empty(1, dtype=dtype)
        probe = self._tables(0, 8)
        width = probe[0].shape[-1]
        # Most modules give each half of a head the same table; gpt-oss gives it once.
        repeats = width % 2 == 0 and all(torch.equal(*table.tensor_split(2, -1)) for table in probe)
        self._width = width // 2 if repeats else width
        self.rotary = 2 * self._width
        self.cos = torch.empty(max_len, self._width)
        self.sin = torch.empty(max_len, self._width)
        self._filled = 0

    def reach(self, position: int) -> None:
        """Both tables hold this position afterwards, if it is one of theirs."""
        while self._filled <= min(position, len(self.cos) - 1):
            last = min(self._filled + self.STEP, len(self.cos))
            cos, sin = self._tables(self._filled, last)
            self.cos[self._filled : last] = cos[:, : self._width]
            self.sin[self._filled : last] = sin[:, : self._width]
            self._filled = last

    def _tables(self, first: int, last: int) -> list[torch.Tensor]:
        """Rounded to the model's dtype, as those that turned the keys of prompts."""
        tables = self._rotary(self._like, torch.arange(first, last)[None])
        if isinstance(tables, torch.Tensor):  # DeepSeek V2: cos + i sin
            tables = (tables.real, tables.imag)
        return [table[0].float() for table in tables]


@dataclass
class Block:
    attention: nn.Module
    ffn: nn.Module
    norms: tuple[torch.Tensor, torch.Tensor]
    window: int
    heads: Heads | None = None  # of latent attention
    experts: _core.MoELayer | None = None
    router: _core.Linear | None = None
    correction: torch.Tensor | None = None
    shared: nn.Module | None = None
    scalar: KTLinear | None = None


@dataclass
class Parts:
    family: Family
    config: object
    embedding: torch.Tensor
    rotary: nn.Module
    head: KTLinear
    final_norm: torch.Tensor
    eps: float
    runtime: runtime.Runtime
    blocks: list[Block] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def vocabulary(self) -> int:
        return self.head.out_features


def _take_apart(model: "PreTrainedModel") -> Parts:
    config = model.config
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UnknownError(f"the native decoder does not know {config.model_type}")
    for name in _UNKNOWN:
        if getattr(config, name, None) is not None:
            raise UnknownError(f"the native decoder does not know {name}={getattr(config, name)}")
    decoder = model.get_decoder()
    embedding = decoder.embed_tokens.weight
    if embedding.dtype != torch.bfloat16 or embedding.device.type != "cpu":
        raise UnknownError(
            f"the native decoder needs a model in bfloat16 on the CPU, not {embedding.dtype} on {embedding.device}"
        )
    _only(model, {"model", "lm_head"}, "the model")
    _only(decoder, {"embed_tokens", "layers", "norm", "rotary_emb"}, "the model")
    found = _runtime_of(model)
    if any(linears_of(model)):
        replace_linears(model, preferred_format(kt_kernel.__cpu_variant__) or "bf16", found)
    parts = Parts(
        family,
        config,
        embedding.detach().contiguous(),
        decoder.rotary_emb,
        _linear(model, "lm_head"),
        _norm(decoder.norm, config),
        config.rms_norm_eps,
        found,
    )
    parts.blocks = [_block(parts, layer, i) for i, layer in enumerate(decoder.layers)]
    return parts


def _runtime_of(model: nn.Module) -> runtime.Runtime:
    for module in model.modules():
        if isinstance(module, KTLinear):
            return module.runtime
        if layer := vars(module).get("kt_layer"):
            return layer.wrapper.runtime
    return runtime.runtime_for(runtime.plan_pool(torch.get_num_threads(), None, None))


def _only(module: nn.Module, known: set[str], what: str) -> None:
    if others := [name for name, child in module.named_children() if name not in known and child is not None]:
        raise UnknownError(f"the native decoder does not know {', '.join(others)} of {what}")


def _linear(module: nn.Module, name: str) -> KTLinear:
    found = getattr(module, name, None)
    if not isinstance(found, KTLinear):
        raise UnknownError(f"{name} is a {type(found).__name__}, not a linear of ours")
    return found


def _norm(module: nn.Module, config: object) -> torch.Tensor:
    """The weights of an RMS norm, x / sqrt(mean(x^2) + eps) * weight; held against what the module computes."""
    weight = module.weight.detach().float()
    probe = torch.linspace(-2, 3, len(weight))
    normed = probe * torch.rsqrt(probe.square().mean() + config.rms_norm_eps) * weight
    if not torch.allclose(module(probe.to(module.weight.dtype)).float(), normed, rtol=0.03, atol=0.03):
        raise UnknownError(f"{type(module).__name__} is no RMS norm that the native decoder knows")
    return weight.contiguous()


def _window(parts: Parts, layer: int) -> int:
    config, windows = parts.config, parts.family.windows
    if windows == "none" or not getattr(config, "sliding_window", None):
        return 0
    if windows == "all":
        return config.sliding_window
    kind = config.layer_types[layer]
    if kind not in ("full_attention", "sliding_attention"):
        raise UnknownError(f"the native decoder does not know attention of type {kind}")
    return config.sliding_window if kind == "sliding_attention" else 0


def _block(parts: Parts, layer: nn.Module, index: int) -> Block:
    _only(layer, {"self_attn", parts.family.ffn, "input_layernorm", "post_attention_layernorm"}, "a layer")
    is_latent = hasattr(layer.self_attn, "kv_b_proj")
    _only(layer.self_attn, _LATENT if is_latent else _ATTENTION, "the attention")
    ffn = getattr(layer, parts.family.ffn)
    norms = (_norm(layer.input_layernorm, parts.config), _norm(layer.post_attention_layernorm, parts.config))
    block = Block(layer.self_attn, ffn, norms, _window(parts, index))
    if is_latent:
        _linear(layer.self_attn, "kv_b_proj")
        block.heads = Heads.of(layer.self_attn)
    if hasattr(ffn, "experts"):
        _take_experts(parts, block, index)
    else:
        _check_mlp(parts, ffn)
        block.shared = ffn
    return block


def _check_mlp(parts: Parts, mlp: nn.Module) -> None:
    _only(mlp, _MLP, "the MLP")
    if parts.config.hidden_act not in ("silu", "swish"):
        raise UnknownError(f"the native decoder does not know MLPs with {parts.config.hidden_act}")


def _take_experts(parts: Parts, block: Block, index: int) -> None:
    family, ffn = parts.family, block.ffn
    known = {"experts", family.router, family.shared, family.scalar}
    _only(ffn, known - {None}, "the experts' block")
    layer = vars(ffn.experts).get("kt_layer")
    if layer is None or layer.on_gpu is not None:
        raise UnknownError(f"the experts of layer {index} are not all on our kernels")
    router = getattr(ffn, family.router)
    weight, bias = router.weight.detach(), getattr(router, "bias", None)
    if not torch.equal(weight.to(torch.bfloat16).to(weight.dtype), weight):
        raise UnknownError(f"the router of layer {index} needs more than bfloat16")
    block.experts = layer.wrapper.moe
    block.router = _core.Linear(
        parts.runtime.pool, format="bf16", rows=weight.shape[0], columns=weight.shape[1], bias=bias is not None
    )
    block.router.load(weight.to(torch.bfloat16).contiguous())
    if bias is not None:
        block.router.load_bias(bias.detach().float().contiguous())
    if family.correction:
        holder = router if family.correction == "router" else ffn
        block.correction = holder.e_score_correction_bias.detach().float().contiguous()
    if family.shared:
        block.shared = getattr(ffn, family.shared)
        _check_mlp(parts, block.shared)
    if family.scalar:
        block.scalar = _linear(ffn, family.scalar)


def _multipliers(parts: Parts) -> dict[str, float]:
    config, names = parts.config, parts.family.multipliers
    if names is None:
        return {}
    if names == "granite":
        embedding, residual = config.embedding_multiplier, config.residual_multiplier
    else:
        embedding, residual = config.scale_emb, config.scale_depth / config.num_hidden_layers**0.5
    return {"embedding_scale": embedding, "residual_scale": residual, "logits_scale": 1 / config.logits_scaling}


def _make_decoder(parts: Parts, cache: "SlotCache", rope: RopeTables) -> _core.Decoder:
    spec = _core.DecoderSpec(
        hidden=parts.embedding.shape[1],
        vocabulary=parts.vocabulary,
        slots=cache.slots,
        max_len=cache.max_len,
        max_batch=cache.slots,
        eps=parts.eps,
        embedding=parts.embedding.data_ptr(),
        final_norm=parts.final_norm,
        head=parts.head.kt_linear,
        **_multipliers(parts),
    )
    for index, block in enumerate(parts.blocks):
        spec.add_block(attention_norm=block.norms[0], ffn_norm=block.norms[1])
        add = _add_attention if block.heads is None else _add_latent_attention
        add(spec, parts, block, cache.keys[index], cache.values[index], rope)
        if block.shared is not None:
            linears = {name: _linear(block.shared, f"{name}_proj").kt_linear for name in ("gate", "up", "down")}
            spec.set_mlp(**linears, scalar=block.scalar and block.scalar.kt_linear)
        if block.experts is not None:
            _add_experts(spec, parts, block)
    return _core.Decoder(parts.runtime.pool, spec)


def _add_attention(
    spec: _core.DecoderSpec, parts: Parts, block: Block, keys: torch.Tensor, values: torch.Tensor, rope: RopeTables
) -> None:
    attention = block.attention
    if keys.dtype != torch.bfloat16 or keys.shape != values.shape or keys.stride() != values.stride():
        raise ValueError(f"keys {keys.dtype} {list(keys.shape)} and values {list(values.shape)} are not bf16 and alike")
    head_dim = keys.shape[3]
    floats = {
        name: _norm(getattr(attention, name), parts.config) for name in ("q_norm", "k_norm") if hasattr(attention, name)
    }
    if hasattr(attention, "sinks"):
        floats["sinks"] = attention.sinks.detach().float().contiguous()
    spec.set_attention(
        **{name: _linear(attention, f"{name}_proj").kt_linear for name in "qkvo"},
        heads=attention.q_proj.out_features // head_dim,
        kv_heads=keys.shape[1],
        head_dim=head_dim,
        scale=attention.scaling,
        window=block.window,
        rotary=rope.rotary,
        **floats,
    )
    _add_memory(spec, rope, keys, values)


def _add_latent_attention(
    spec: _core.DecoderSpec, parts: Parts, block: Block, keys: torch.Tensor, values: torch.Tensor, rope: RopeTables
) -> None:
    attention, heads = block.attention, block.heads
    behind = keys.data_ptr() + heads.rank * keys.element_size()
    if (keys.dtype, keys.shape[1], keys.shape[3]) != (torch.bfloat16, 1, heads.rank) or values.data_ptr() != behind:
        raise ValueError(
            f"keys {keys.dtype} {list(keys.shape)} and values {list(values.shape)} are not latents of "
            f"{heads.rank} elements in bf16 with turned keys behind them"
        )
    linears = {"q": "q_proj"} if attention.q_lora_rank is None else {"q_a": "q_a_proj", "q": "q_b_proj"}
    linears |= {"kv_a": "kv_a_proj_with_mqa", "o": "o_proj"}
    norms = {"kv_norm": attention.kv_a_layernorm}
    if attention.q_lora_rank is not None:
        norms["q_norm"] = attention.q_a_layernorm
    if len(eps := {norm.variance_epsilon for norm in norms.values()}) > 1:
        raise UnknownError(f"the native decoder does not know latents with norms of different eps, {sorted(eps)}")
    pairs = parts.family.pairs or ("gathered" if parts.config.rope_interleave else "halves")
    spec.set_latent_attention(
        **{name: _linear(attention, linear).kt_linear for name, linear in linears.items()},
        **{name: _norm(norm, parts.config) for name, norm in norms.items()},
        k_up=heads.k_up,
        v_up=heads.v_up,
        heads=heads.heads,
        rank=heads.rank,
        nope=heads.nope,
        value_dim=heads.value_dim,
        eps=eps.pop(),
        scale=attention.scaling,
        rotary=rope.rotary,
        pairs=pairs,
    )
    _add_memory(spec, rope, keys, None)


def _add_memory(spec: _core.DecoderSpec, rope: RopeTables, keys: torch.Tensor, values: torch.Tensor | None) -> None:
    spec.set_memory(
        cos=rope.cos.data_ptr(),
        sin=rope.sin.data_ptr(),
        keys=keys.data_ptr(),
        values=0 if values is None else values.data_ptr(),
        slot_pitch=keys.stride(0),
        head_pitch=keys.stride(1),
        position_pitch=keys.stride(2),
    )


def _add_experts(spec: _core.DecoderSpec, parts: Parts, block: Block) -> None:
    config, family = parts.config, parts.family
    renormalise = config.norm_topk_prob if family.renormalise is None else family.renormalise
    routing = {}
    if family.group_best:
        routing = {"scale": config.routed_scaling_factor, "group_best": family.group_best}
        # DeepSeek V2 has groups and may not use them.
        if family.group_best == 2 or config.topk_method != "greedy":
            routing |= {"groups": config.n_group or 1, "top_groups": config.topk_group or 1}
    spec.set_experts(
        experts=block.experts,
        router=block.router,
        kind=family.kind,
        renormalise=renormalise,
        correction=block.correction,
        **routing,
    )

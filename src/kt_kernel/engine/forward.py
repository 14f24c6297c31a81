"""The two calls that the scheduler makes of a model: prefill of one slot, decode of many.

SlotForward runs transformers' forward over a SlotCache; families whose layers keep a state instead of keys run in
OwnCacheForward, one request at a time on the cache that transformers makes for them. `open_forward` chooses, and
believes neither: a short text must give the logits of a forward without any cache.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kt_kernel.engine import attention
from kt_kernel.engine.latents import keep_latents
from kt_kernel.engine.sizes import MIN_CONTEXT
from kt_kernel.engine.slots import SlotCache

log = logging.getLogger(__name__)

# decode(slots, tokens, positions) -> float32 [n, vocabulary], keys written at the positions
Decode = Callable[[Sequence[int], Sequence[int], Sequence[int]], torch.Tensor]

# bf16 rounding moves logits by 1 to 5 % over 48 layers, and now and then an expert; keys in the wrong place by 100 %.
MAX_ERROR = 0.2
PROBE_TOKENS = MIN_CONTEXT


class Forward(Protocol):
    model: PreTrainedModel
    slots: int
    context: int
    decoder: str  # who decodes, in words
    whole_prompts: bool  # prefill takes a prompt in one piece only
    can_go_back: bool  # keep() drops as much as is asked, else everything

    def prefill(self, slot: int, tokens: Sequence[int], n_logits: int = 1) -> torch.Tensor:
        """Appends tokens to the slot; logits of the last one, float32 [vocabulary]. With n_logits = 0, none: [0]."""

    def decode(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Appends one token to each slot, which holds `positions` tokens so far; logits, float32 [n, vocabulary]."""

    def keep(self, slot: int, length: int) -> int:
        """Drops what the slot holds beyond its first `length` tokens, or all of it; how many it holds then."""

    def copy(self, source: int, target: int, length: int) -> bool:
        """target then holds the first `length` tokens of source; False where that cannot be done."""


class SlotForward:
    whole_prompts = False
    can_go_back = True

    def __init__(self, model: PreTrainedModel, slots: int, context: int):
        model.set_attn_implementation(attention.NAME)
        keep_latents(model)
        self.model = model
        self._agreed: Decode | None = None
        self._native: Decode | None = None  # the one that decodes
        self.decoder = "transformers"
        self.resize(slots, context)

    def resize(self, slots: int, context: int) -> None:
        """Drops what all slots hold."""
        self.slots = slots
        self.context = context
        self.cache = SlotCache(slots, context)

    def prefill(self, slot: int, tokens: Sequence[int], n_logits: int = 1) -> torch.Tensor:
        return self._run([slot], [tokens], n_logits)[0]

    def decode(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        held = [self.cache.lengths[slot] for slot in slots]
        if held != list(positions):
            raise ValueError(f"slots {list(slots)} hold {held} tokens, not {list(positions)}")
        if self._native is None:
            return self._run(slots, [[token] for token in tokens])
        with self.cache.step(slots, 1):
            return self._native(slots, tokens, positions)

    def _run(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], n_logits: int = 1) -> torch.Tensor:
        n_tokens = len(tokens[0])
        starts = torch.tensor([[self.cache.lengths[slot]] for slot in slots])
        device = self.model.device
        with self.cache.step(slots, n_tokens):
            output = self.model(
                input_ids=torch.tensor(tokens, device=device),
                position_ids=(starts + torch.arange(n_tokens)).to(device),
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=_rows_with_logits(n_tokens, n_logits),
            )
        return output.logits.flatten(1).float().cpu()

    def keep(self, slot: int, length: int) -> int:
        self.cache.truncate(slot, length)
        return self.cache.lengths[slot]

    def copy(self, source: int, target: int, length: int) -> bool:
        self.cache.copy(source, target, length)
        return True

    def use_native(self, build: Callable[[PreTrainedModel, SlotCache], "Decode | str"]) -> None:
        """Decodes natively from now on if `build` can and its logits are transformers'; a log line says why not."""
        expected = self._probe_decode(None)  # this also makes the keys and values, which `build` takes the addresses of
        reason = None
        try:
            native = build(self.model, self.cache)
            if isinstance(native, str):
                reason = native
            elif (error := relative_error(self._probe_decode(native), expected)) > MAX_ERROR:
                reason = f"the native decoder's logits differ by {error:.0%}"
        except Exception as error:
            reason = f"the native decoder failed: {error}"
        if reason is None:
            self._agreed = native
            self.decode_by(True)
        else:
            log.info("decode stays with transformers: %s", reason)

    def decode_by(self, native: bool) -> None:
        """Whether the native decoder that has been agreed on decodes from now on, if there is one; for measurements."""
        self._native = self._agreed if native else None
        self.decoder = "transformers" if self._native is None else "native"

    def _probe_decode(self, native: Decode | None) -> torch.Tensor:
        """Logits of the second half of a short text, in slots whose lengths differ."""
        tokens = probe_tokens(self.model)
        half = len(tokens) // 2
        slots = list(range(min(2, self.slots)))
        logits = []
        try:
            for slot in slots:
                self.keep(slot, 0)
                self.prefill(slot, tokens[slot:half])
            self._native = native
            for at in range(half, len(tokens)):
                rows = self.decode(slots, [tokens[at]] * len(slots), [at - slot for slot in slots])
                logits.append(rows.clone())  # a decoder may use its memory again
        finally:
            self._native = None
            for slot in slots:
                self.keep(slot, 0)
        return torch.cat(logits)


class OwnCacheForward:
    """One slot, whose state cannot go back: it is continued, or dropped."""

    slots = 1
    decoder = "transformers"
    can_go_back = False

    def __init__(self, model: PreTrainedModel, context: int, whole_prompts: bool = False):
        self.model = model
        self.context = context
        self.whole_prompts = whole_prompts
        self._cache: object | None = None
        self._length = 0

    def prefill(self, slot: int, tokens: Sequence[int], n_logits: int = 1) -> torch.Tensor:
        try:
            output = self.model(
                input_ids=torch.tensor([list(tokens)], device=self.model.device),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=_rows_with_logits(len(tokens), n_logits),
            )
        except BaseException:
            self.keep(slot, 0)  # some layers have taken the tokens, others not
            raise
        self._cache = output.past_key_values
        self._length += len(tokens)
        return output.logits[0].flatten().float().cpu()

    def decode(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        if list(slots) != [0] or list(positions) != [self._length]:
            raise ValueError(f"slot 0 holds {self._length} tokens; asked for {list(positions)} of {list(slots)}")
        return self.prefill(0, tokens)[None]

    def keep(self, slot: int, length: int) -> int:
        if length < self._length or self.whole_prompts:
            self._cache, self._length = None, 0
        return self._length

    def copy(self, source: int, target: int, length: int) -> bool:
        return False


def _rows_with_logits(n_tokens: int, n_logits: int) -> torch.Tensor:
    """The head of a large vocabulary takes as long as several layers, and only the end of a prompt needs it."""
    return torch.arange(n_tokens - n_logits, n_tokens)


def open_forward(model: PreTrainedModel, slots: int, context: int) -> Forward:
    """RuntimeError: no way of running the model with a cache gives what it gives without one."""
    tokens = probe_tokens(model)
    expected = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0].float().cpu()
    stock = model.config._attn_implementation
    reasons = []
    for name, make in _candidates(model, slots, context):
        try:
            forward = make()
            error = _probe_error(forward, tokens, expected)
            if error <= MAX_ERROR:
                if reasons:
                    log.info("%s runs %s: %s", model.config.model_type, name, "; ".join(reasons))
                return forward
            reasons.append(f"{name}, its logits differ by {error:.0%}")
        except Exception as error:  # of model code that was never meant for this
            reasons.append(f"{name}, {type(error).__name__}: {error}")
        model.set_attn_implementation(stock)
    raise RuntimeError(f"{model.config.model_type} cannot be run with a cache: {'; '.join(reasons)}")


def _candidates(model: PreTrainedModel, slots: int, context: int) -> list[tuple[str, Callable[[], Forward]]]:
    ways: list[tuple[str, Callable[[], Forward]]] = [
        ("one request at a time", lambda: OwnCacheForward(model, context)),
        ("one request at a time, prompts whole", lambda: OwnCacheForward(model, context, whole_prompts=True)),
    ]
    if holds_keys_only(model):
        ways.insert(0, ("many requests at once", lambda: SlotForward(model, slots, context)))
    return ways


def holds_keys_only(model: PreTrainedModel) -> bool:
    """Whether all layers of the cache that transformers would make are keys and values, whatever their window is."""
    try:
        layers = DynamicCache(config=model.config).layers
    except (AttributeError, KeyError, TypeError, ValueError):  # kinds of layers that only the model itself knows
        return False
    return bool(layers) and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


def probe_tokens(model: PreTrainedModel, length: int = PROBE_TOKENS) -> list[int]:
    """A text of no meaning, the same for every start; special tokens, which are first or last, are left out."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocabulary // 4, max(vocabulary // 2, 1), (length,), generator=generator).tolist()


def _probe_error(forward: Forward, tokens: list[int], expected: torch.Tensor) -> float:
    """A prompt in two pieces and a few single tokens; with slots, a second text of another length beside them.

    Of the slot with the larger error.
    """
    piece = len(tokens) // 4
    cut = len(tokens) // 2
    slots = [0, 1][: forward.slots]
    logits: list[dict[int, torch.Tensor]] = [{} for _ in slots]  # of each slot, by position
    if not forward.whole_prompts:
        forward.prefill(0, tokens[:piece], n_logits=0)
        logits[0][cut - 1] = forward.prefill(0, tokens[piece:cut])
    else:
        logits[0][cut - 1] = forward.prefill(0, tokens[:cut])
    if len(slots) > 1:
        logits[1][piece - 1] = forward.prefill(1, tokens[:piece])
    for step in range(len(tokens) - cut):
        positions = [cut + step, piece + step][: len(slots)]
        rows = forward.decode(slots, [tokens[position] for position in positions], positions)
        for slot in slots:
            logits[slot][positions[slot]] = rows[slot]
    for slot in slots:
        forward.keep(slot, 0)
    return max(relative_error(torch.stack(list(found.values())), expected[list(found)]) for found in logits)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Median over rows of |got - wanted| / |wanted - its mean|: a row or two with other experts are forgiven."""
    spread = (wanted - wanted.mean(-1, keepdim=True)).norm(dim=-1)
    error = ((got - wanted).norm(dim=-1) / spread.clamp_min(1e-20)).median().item()
    return error if error == error else float("inf")

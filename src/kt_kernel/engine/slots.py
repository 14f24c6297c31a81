"""Keys and values of all requests: for each layer two tensors [slots, kv_heads, max_len, depth].

They are made from the first keys that the model hands over, so that GQA, MLA and layers of different depth fit alike.
Of MLA transformers hands over latents as keys and turned keys as values, both of one head: 576 numbers of a token
instead of the tens of thousands that they expand to. Such a value lies behind its key, so that both are read as one
row. Memory is only reserved then: pages are taken when tokens are written to them, so a short request costs
what it uses.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers.cache_utils import Cache

from kt_kernel.engine.rows import Rows, set_rows


class SlotCache(Cache):
    def __init__(self, slots: int, max_len: int):
        super().__init__(layers=[])
        self.slots = slots
        self.max_len = max_len
        self.keys: dict[int, torch.Tensor] = {}  # by layer
        self.values: dict[int, torch.Tensor] = {}
        self.lengths = [0] * slots  # tokens whose keys a slot holds
        self._rows: Rows | None = None

    @property
    def bytes_per_token(self) -> int:
        """Of one slot; 0 before the first forward."""
        buffers = [*self.keys.values(), *self.values.values()]
        return sum(buffer.shape[1] * buffer.shape[3] * buffer.element_size() for buffer in buffers)

    @contextmanager
    def step(self, slots: Sequence[int], n_tokens: int) -> Iterator[None]:
        """The next forward appends n_tokens to each of these slots. They count once it has succeeded."""
        for slot in slots:
            if self.lengths[slot] + n_tokens > self.max_len:
                raise ValueError(
                    f"slot {slot} holds {self.lengths[slot]} tokens of at most {self.max_len}: no room for {n_tokens}"
                )
        self._rows = Rows(tuple(slots), tuple(self.lengths[slot] for slot in slots), n_tokens)
        set_rows(self._rows)
        try:
            yield
            for slot in slots:
                self.lengths[slot] += n_tokens
        finally:
            self._rows = None
            set_rows(None)

    def truncate(self, slot: int, length: int) -> None:
        self.lengths[slot] = min(self.lengths[slot], length)

    def copy(self, source: int, target: int, length: int) -> None:
        """target then holds the first tokens of source, and nothing else."""
        if length > self.lengths[source]:
            raise ValueError(f"slot {source} holds {self.lengths[source]} tokens, not {length}")
        for buffers in (self.keys, self.values):
            for buffer in buffers.values():
                buffer[target, :, :length] = buffer[source, :, :length]
        self.lengths[target] = length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._rows is None:
            raise ValueError("keys of slots change in a step of the engine only")
        if layer_idx not in self.keys:
            self.keys[layer_idx], self.values[layer_idx] = self._buffers(key_states, value_states)
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        rows = self._rows
        if len(rows.slots) == 1:
            slot, first = rows.slots[0], rows.positions[0]
            last = first + rows.n_tokens
            keys[slot, :, first:last] = key_states[0]
            values[slot, :, first:last] = value_states[0]
            return keys[slot : slot + 1, :, :last], values[slot : slot + 1, :, :last]
        slots = torch.tensor(rows.slots, device=keys.device)[:, None]
        positions = torch.tensor([[first + i for i in range(rows.n_tokens)] for first in rows.positions])
        positions = positions.to(keys.device)
        keys[slots, :, positions] = key_states.transpose(1, 2)
        values[slots, :, positions] = value_states.transpose(1, 2)
        return keys, values

    def _buffers(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def buffer(depth: int) -> torch.Tensor:
            shape = (self.slots, keys.shape[1], self.max_len, depth)
            return torch.empty(shape, dtype=keys.dtype, device=keys.device)

        depths = keys.shape[3], values.shape[3]
        are_latents = keys.shape[1] == 1 and depths[0] != depths[1]
        return buffer(sum(depths)).split(depths, -1) if are_latents else tuple(map(buffer, depths))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Of one slot; of several, whose lengths differ, none: their positions are given to the forward."""
        return self._rows.positions[0] if self._rows is not None and len(self._rows.slots) == 1 else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

"""Slices of experts for the ranks of a tensor-parallel GPU, against the bytes that each should get.

Rank r of R has rows r I / R on of gate and up, the same columns of down, and every scale that its weights have.
"""

from dataclasses import dataclass

import numpy as np

from kt_kernel import _core

RANKS = (1, 2, 4)
_SIZES = (200, 480)  # hidden, intermediate: ranks share blocks and groups
GUARD = 64  # bytes around a buffer
FORMATS = [name for name in _core.formats() if _core.has_slices(name)]
NAMES = ("w13_weight", "w13_scale", "w2_weight", "w2_scale")
FP8_BLOCK = 128
GROUPS = {"bf16": 0, "fp8": FP8_BLOCK, "fp8c": 0}  # else 32
SCALES = {"fp8": np.float32, "rawint4": np.uint16, "mxfp8": np.uint8, "mxfp4": np.uint8}


@dataclass
class Matrix:
    """[n, k] as in a file: ``scales`` [n / block, k / group], or [n] where rows have one each."""

    codes: np.ndarray
    scales: np.ndarray | None
    per_byte: int  # codes in an element
    group: int
    block: int

    def encoded(self) -> "_core.EncodedMatrix":
        if self.scales.ndim == 1:
            return _core.EncodedMatrix(self.codes, rows=self.scales)
        return _core.EncodedMatrix(self.codes, self.scales, block_rows=self.block)

    def weights(self, rows: slice, columns: slice) -> np.ndarray:
        return self.codes[rows, columns.start // self.per_byte : columns.stop // self.per_byte]

    def scales_of(self, rows: slice, columns: slice) -> np.ndarray:
        """All that these weights have, also where others have them too."""
        if self.scales.ndim == 1:
            return self.scales[rows]
        first, end = rows.start // self.block, -(-rows.stop // self.block)
        return self.scales[first:end, columns.start // self.group : -(-columns.stop // self.group)]


def random_matrix(rng: np.random.Generator, weight_format: str, n: int, k: int) -> Matrix:
    if weight_format == "bf16":
        return Matrix(rng.integers(0, 1 << 16, (n, k), np.uint16), None, 1, 0, 1)
    per_byte = 2 if weight_format in ("mxfp4", "rawint4") else 1
    group, block = GROUPS.get(weight_format, 32), FP8_BLOCK if weight_format == "fp8" else 1
    codes = rng.integers(0, 256, (n, k // per_byte), np.uint8)
    if per_byte == 1:
        codes[codes & 0x7F == 0x7F] = 0  # NaN
    if weight_format == "fp8c":
        return Matrix(codes, rng.standard_normal(n, np.float32), per_byte, group, block)
    shape, dtype = (-(-n // block), -(-k // group)), np.dtype(SCALES[weight_format])
    if dtype == np.uint8:
        scales = rng.integers(0, 200, shape, dtype)  # e8m0
    else:
        scales = rng.standard_normal(shape, np.float32)
        scales = scales if dtype == np.float32 else (scales.view(np.uint32) >> 16).astype(dtype)
    return Matrix(codes, scales, per_byte, group, block)


class Experts:
    """Random experts of one format: gate, up and down of each."""

    def __init__(self, weight_format: str, experts: int, hidden: int, intermediate: int, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.format, self.hidden, self.intermediate = weight_format, hidden, intermediate
        shapes = [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]
        self.all = [[random_matrix(rng, weight_format, *shape) for shape in shapes] for _ in range(experts)]

    def layer(self, pool: "_core.Pool", logical_ids=None) -> "_core.MoELayer":
        layer = _core.MoELayer(
            pool,
            format=self.format,
            num_experts=len(self.all),
            top_k=1,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            max_tokens=4,
            group_size=GROUPS.get(self.format, 32),
        )
        for slot, expert in enumerate(logical_ids or range(len(self.all))):
            if self.format == "bf16":
                layer.load_expert(slot, *(matrix.codes for matrix in self.all[expert]))
            else:
                layer.load_encoded(slot, *(matrix.encoded() for matrix in self.all[expert]))
        return layer

    def slices(self, expert: int, ranks: int, rank: int) -> dict[str, bytes]:
        gate, up, down = self.all[expert]
        part = self.intermediate // ranks
        mine, whole = slice(rank * part, (rank + 1) * part), slice(0, self.hidden)
        w13 = [matrix.weights(mine, whole).tobytes() for matrix in (gate, up)]
        w13_scale, w2_scale = b"", b""
        if self.format != "bf16":
            w13_scale = b"".join(self.stored(matrix.scales_of(mine, whole)) for matrix in (gate, up))
            w2_scale = self.stored(down.scales_of(whole, mine))
        return dict(zip(NAMES, (b"".join(w13), w13_scale, down.weights(whole, mine).tobytes(), w2_scale), strict=True))

    def stored(self, scales: np.ndarray) -> bytes:
        """MXFP4: 2^(e - 127) in bf16, of which all but the lowest have no mantissa."""
        if self.format != "mxfp4":
            return scales.tobytes()
        bits = scales.astype(np.uint16) << 7
        bits[scales == 0] = 0x0040
        return bits.tobytes()


class Buffers:
    """Memory of all ranks, with bytes around it that must stay as they are."""

    FILL = 0xA5

    def __init__(self, layer: "_core.MoELayer", ranks: int, expert: int = 0):
        self.sizes = [dict(zip(NAMES, sizes, strict=True)) for sizes in layer.slice_bytes(ranks, expert)]
        self.memory = [
            {name: np.full(size + 2 * GUARD, self.FILL, np.uint8) for name, size in sizes.items()}
            for sizes in self.sizes
        ]

    def pointers(self) -> list[list[int]]:
        """In the order of the arguments."""
        return [[memory[name].ctypes.data + GUARD for memory in self.memory] for name in NAMES]

    def written(self, rank: int) -> dict[str, bytes]:
        return {name: array[GUARD:-GUARD].tobytes() for name, array in self.memory[rank].items()}

    def overrun(self) -> list[str]:
        """Where bytes were written that belong to nobody."""
        found = []
        for memory in self.memory:
            for name, array in memory.items():
                found += [f"bytes in front of {name}"] if (array[:GUARD] != self.FILL).any() else []
                found += [f"bytes behind {name}"] if (array[-GUARD:] != self.FILL).any() else []
        return found


def faults(buffers: Buffers, experts: Experts, expert: int) -> list[str]:
    """What is not as it should be; nothing if all is."""
    found = buffers.overrun()
    ranks = len(buffers.memory)
    for rank in range(ranks):
        wanted, got = experts.slices(expert, ranks, rank), buffers.written(rank)
        found += [f"{name} of rank {rank} of {ranks}" for name in wanted if got[name] != wanted[name]]
    return found


def check_slices(weight_format: str) -> dict:
    """For 1, 2 and 4 GPUs, from 1 and 2 sub-pools; in plain values."""
    experts = Experts(weight_format, 2, *_SIZES)
    failures = []
    for subpools in (1, 2):
        pool = _core.Pool([1] * subpools, spin_us=0)
        layer, queue = experts.layer(pool), _core.Queue(pool)
        for ranks in RANKS:
            buffers = Buffers(layer, ranks, 1)
            task = _core.WriteSlicesTask(layer, ranks, 1, *buffers.pointers())
            queue.submit(task)
            queue.sync()
            failures += [f"slices from {subpools} sub-pools: {fault}" for fault in faults(buffers, experts, 1)]
    return {"format": weight_format, "ranks": list(RANKS), "failures": failures}

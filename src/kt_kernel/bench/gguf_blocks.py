"""Random rows of GGUF types: every code and every scale inside a block by chance, f16 scales that give a deviation."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Block:
    """Layout of a block: ``weights`` of a row in ``size`` bytes.

    ``deviation`` is that of weights when the scale is 1. A type with a minimum has it scaled by ``minimum_scale`` times
    the scale, which makes the mean zero.
    """

    weights: int
    size: int
    scale_at: int  # an f16
    deviation: float
    minimum_at: int | None = None  # an f16
    minimum_scale: float = 0.0


BLOCKS = {
    "q4_0": Block(32, 18, 0, 4.61),
    "q4_1": Block(32, 20, 0, 4.61, 2, -7.5),
    "q5_0": Block(32, 22, 0, 9.23),
    "q5_1": Block(32, 24, 0, 9.23, 2, -15.5),
    "q8_0": Block(32, 34, 0, 73.9),
    "q2_k": Block(256, 84, 80, 13.9, 82, 1.5),
    "q3_k": Block(256, 110, 108, 43.4),
    "q4_k": Block(256, 144, 0, 258.0, 2, 7.5),
    "q5_k": Block(256, 176, 0, 526.0, 2, 15.5),
    "q6_k": Block(256, 210, 208, 1362.0),
    "iq4_nl": Block(32, 18, 0, 67.1),
    "iq4_xs": Block(256, 136, 0, 1242.0),
    "iq2_xxs": Block(256, 66, 0, 53.4),
    "iq2_xs": Block(256, 74, 0, 55.9),
    "iq2_s": Block(256, 82, 0, 56.4),
    "iq3_xxs": Block(256, 98, 0, 142.6),
    "iq3_s": Block(256, 110, 0, 140.6),
    "iq1_s": Block(256, 50, 0, 7.21),
    "iq1_m": Block(256, 56, 48, 7.21),
    "tq1_0": Block(256, 54, 52, 0.817),
    "tq2_0": Block(256, 66, 64, 1.12),
}


def bytes_per_weight(name: str) -> float:
    return BLOCKS[name].size / BLOCKS[name].weights


def random_rows(rng: np.random.Generator, name: str, rows: int, depth: int, sigma: float) -> np.ndarray:
    """[rows, bytes of a row], uint8. The scale differs from block to block, by up to 1.5 times."""
    block = BLOCKS[name]
    if depth % block.weights:
        raise ValueError(f"{name} has blocks of {block.weights} weights: rows of {depth} cannot be cut into them")
    blocks = np.frombuffer(rng.bytes(rows * (depth // block.weights) * block.size), np.uint8).copy()
    blocks = blocks.reshape(-1, block.size)
    scales = (rng.uniform(0.8, 1.2, len(blocks)) * (sigma / block.deviation / _SPREAD)).astype(np.float16)
    if name == "iq1_m":  # its scale lies in the high nibbles of four 16-bit words
        words = blocks[:, block.scale_at :].view("<u2")
        words &= 0x0FFF
        words |= (scales.view(np.uint16)[:, None] << np.array([12, 8, 4, 0], np.uint16)) & 0xF000
    else:
        blocks[:, block.scale_at : block.scale_at + 2] = scales[:, None].view(np.uint8)
    if block.minimum_at is not None:
        minima = (scales.astype(np.float32) * block.minimum_scale).astype(np.float16)
        blocks[:, block.minimum_at : block.minimum_at + 2] = minima[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


# Root of the mean square of the factors from block to block.
_SPREAD = (1 + 0.4**2 / 12) ** 0.5

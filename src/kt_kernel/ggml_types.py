"""The types of tensors in GGUF files: how many weights a block has, and how many bytes.

Layers have formats of the same names. Rows are made of whole blocks.
"""

from typing import NamedTuple


class GgmlType(NamedTuple):
    name: str
    block: int  # weights
    bytes: int  # of a block


# By their ids in files: the types that experts may have.
EXPERT_TYPES = {
    0: GgmlType("f32", 1, 4),
    1: GgmlType("f16", 1, 2),
    2: GgmlType("q4_0", 32, 18),
    3: GgmlType("q4_1", 32, 20),
    6: GgmlType("q5_0", 32, 22),
    7: GgmlType("q5_1", 32, 24),
    8: GgmlType("q8_0", 32, 34),
    10: GgmlType("q2_k", 256, 84),
    11: GgmlType("q3_k", 256, 110),
    12: GgmlType("q4_k", 256, 144),
    13: GgmlType("q5_k", 256, 176),
    14: GgmlType("q6_k", 256, 210),
    16: GgmlType("iq2_xxs", 256, 66),
    17: GgmlType("iq2_xs", 256, 74),
    18: GgmlType("iq3_xxs", 256, 98),
    19: GgmlType("iq1_s", 256, 50),
    20: GgmlType("iq4_nl", 32, 18),
    21: GgmlType("iq3_s", 256, 110),
    22: GgmlType("iq2_s", 256, 82),
    23: GgmlType("iq4_xs", 256, 136),
    29: GgmlType("iq1_m", 256, 56),
    30: GgmlType("bf16", 1, 2),
    34: GgmlType("tq1_0", 256, 54),
    35: GgmlType("tq2_0", 256, 66),
    39: GgmlType("mxfp4", 32, 17),
}

# The others: of tensors that are in the same files.
OTHER_TYPES = {
    9: GgmlType("q8_1", 32, 40),
    15: GgmlType("q8_k", 256, 292),
    24: GgmlType("i8", 1, 1),
    25: GgmlType("i16", 1, 2),
    26: GgmlType("i32", 1, 4),
    27: GgmlType("i64", 1, 8),
    28: GgmlType("f64", 1, 8),
    40: GgmlType("nvfp4", 64, 36),
    41: GgmlType("q1_0", 128, 18),
}

TYPES = EXPERT_TYPES | OTHER_TYPES
EXPERT_FORMATS = frozenset(kind.name for kind in EXPERT_TYPES.values())


def layer_format(gate: str, up: str, down: str) -> str:
    """How a layer with these types is called."""
    return gate if gate == up == down else f"{gate}/{up}/{down}"

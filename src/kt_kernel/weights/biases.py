"""Biases of packed experts: {gate_up}_bias [E, 2I], in the order of the outputs of gate_up, and {down}_bias [E, H]."""

import numpy as np

from kt_kernel.weights.config import model_type_beside
from kt_kernel.weights.encodings import FLOATS
from kt_kernel.weights.experts import PROJECTIONS, Sizes
from kt_kernel.weights.floats import to_f32
from kt_kernel.weights.packed import part
from kt_kernel.weights.tensor_files import TensorFiles

# model_type -> whether gate and up alternate. Names and shapes do not tell: these two differ in nothing else.
_ALTERNATING = {"gpt_oss": True, "openai_privacy_filter": False}


def bias_of(matrix: str) -> str:
    return f"{matrix}_bias"


def first_in(files: TensorFiles, names: dict[str, str]) -> str | None:
    """A bias of the matrices that is there; with one of them all are needed."""
    return next((bias for bias in map(bias_of, names.values()) if bias in files), None)


def alternate(files: TensorFiles, bias: str) -> bool:
    """Whether gate and up of experts with biases alternate. Without a config.json they are those of gpt-oss."""
    model_type = model_type_beside(files.path) or "gpt_oss"
    if model_type not in _ALTERNATING:
        raise ValueError(
            f"{files.path}: the experts have biases ({bias!r}), and in which order gate and up are is known of "
            f"{' and '.join(_ALTERNATING)} only, not of {model_type}: the results could be wrong"
        )
    return _ALTERNATING[model_type]


def read(
    files: TensorFiles, names: dict[str, str], sizes: Sizes, experts: int, expert: int, alternating: bool
) -> list[np.ndarray]:
    """f32 gate and up [I] and down [H] of one expert; `names` are those of the matrices."""
    found = []
    for projection in PROJECTIONS:
        rows, _ = sizes.shape(projection)
        total, mine = part(projection, rows, joined=True, alternating=alternating)
        array = files.item(bias_of(names[projection]), FLOATS, (experts, total), expert)
        found.append(to_f32(np.ascontiguousarray(array[mine])))
    return found

"""Experts that are in memory already."""

import numpy as np

from kt_kernel import _core
from kt_kernel.weights.experts import PROJECTIONS, Sizes
from kt_kernel.weights.floats import to_bf16, to_f32_exactly


class TensorExperts:
    """gate and up [E, I, H], down [E, H, I], biases [E, I], [E, I] and [E, H]: tensors of torch or arrays of numpy.
    Experts without gates have None for gate.
    """

    where = "the tensors"

    def __init__(
        self, gate: object, up: object, down: object, sizes: Sizes, biases: tuple[object, object, object] | None = None
    ):
        self._tensors, self.sizes = dict(zip(PROJECTIONS, (gate, up, down), strict=True)), sizes
        self.biases, self._biases = biases is not None, biases
        given = {name: tensor for name, tensor in self._tensors.items() if name != "gate" or tensor is not None}
        shapes = {name: tuple(getattr(tensor, "shape", ())) for name, tensor in given.items()}
        first = next(iter(shapes))
        self.count = shapes[first][0] if shapes[first] else 0
        for name, shape in shapes.items():
            needed = (self.count, *sizes.shape(name))
            if shape != needed or self.count == 0:
                wanted = [self.count or "E", *needed[1:]] if name != first else ["E", *needed[1:]]
                raise ValueError(f"{name}_proj has shape {list(shape)}; it must be {_text(wanted)}")
        for name, bias in zip(PROJECTIONS, biases or (), strict=biases is not None):
            shape, needed = tuple(getattr(bias, "shape", ())), (self.count, sizes.shape(name)[0])
            if shape != needed:
                raise ValueError(f"{name}_bias has shape {list(shape)}; it must be {_text([*needed])}")

    def matrices(self, expert: int) -> list[object]:
        """bf16 gate, up and down."""
        named = self._tensors.items()
        return [None if tensor is None else to_bf16(tensor[expert], f"{name}_proj") for name, tensor in named]

    def load(self, layer: "_core.MoELayer", slot: int, expert: int) -> None:
        layer.load_expert(slot, *self.matrices(expert))
        if self.biases:
            layer.load_biases(slot, *self.bias_vectors(expert))

    def will_need(self, expert: int) -> None:
        """It is there."""

    def forget(self) -> None:
        """The tensors are the caller's."""

    def bias_vectors(self, expert: int) -> list[np.ndarray]:
        """f32 gate, up and down, of experts that have biases."""
        named = zip(PROJECTIONS, self._biases, strict=True)
        return [to_f32_exactly(bias[expert], f"{name}_bias") for name, bias in named]


def _text(shape: list[object]) -> str:
    return f"[{', '.join(map(str, shape))}]"

"""Tensors of torch go in as they are."""

import numpy as np
import pytest
from checkpoint_codes import KEPT
from layer_limits import FORMATS
from layer_reference import Case, Shape, random_batch

torch = pytest.importorskip("torch", reason="torch is not installed: its tensors were not tested")

SHAPE = Shape(experts=3, top_k=2, hidden=72, intermediate=130)


def tensor(bits: np.ndarray) -> "torch.Tensor":
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


@pytest.mark.parametrize("weight_format", [name for name in FORMATS if name not in KEPT])
def test_bfloat16_tensors_give_what_bits_give(weight_format):
    case = Case(SHAPE, weight_format)
    x, ids, weights = random_batch(SHAPE, 9)
    expected = case.run(x, ids, weights)
    layer = Case(SHAPE, weight_format, seed=1).layer
    for expert, matrices in enumerate(case.original):
        layer.load_expert(expert, *map(tensor, matrices))
    inputs = [torch.from_numpy(ids), torch.from_numpy(weights), tensor(x)]
    out = torch.empty((9, SHAPE.hidden), dtype=torch.bfloat16)
    layer.forward(9, *(part.data_ptr() for part in [*inputs, out]))
    assert np.array_equal(out.view(torch.int16).numpy().view(np.uint16), expected)


def test_a_transposed_tensor_is_read_right():
    case = Case(SHAPE)
    gate, up, down = map(tensor, case.original[0])
    case.layer.load_expert(1, gate.T.contiguous().T, up, down)
    assert np.array_equal(case.layer.decode_expert(1)[0], gate.float().numpy())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tensors_of_another_type_are_refused(dtype):
    case = Case(SHAPE)
    matrices = [tensor(matrix).to(getattr(torch, dtype)) for matrix in case.original[0]]
    with pytest.raises(TypeError, match="gate must hold bf16"):
        case.layer.load_expert(0, *matrices)

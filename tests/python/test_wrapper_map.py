"""physical_to_logical_map: which slot gets which expert, from files and from tensors."""

import numpy as np
import pytest
from layer_reference import Shape
from weight_files import checkpoint_tensors, originals, write_safetensors
from wrapper_cases import METHODS, batch, make, same_bits, tensors, torch

SHAPE = Shape(experts=4, top_k=2, hidden=72, intermediate=130)
WIDE = Shape(experts=6, top_k=2, hidden=72, intermediate=130)  # two slots more than experts
MAP = [2, 0, 3, 1]
COPIES = [1, 3, 0, 2, 3, 3]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_safetensors(folder / "model.safetensors", checkpoint_tensors(originals(SHAPE), "model.layers.5", "separate"))
    return folder


@pytest.fixture(params=["files", "tensors"])
def load(request, checkpoint):
    """A function that loads the same experts: original weights in files, or tensors."""

    def from_files(wrapper, *mapping) -> None:
        wrapper.load_weights(*mapping)

    def from_tensors(wrapper, *mapping) -> None:
        wrapper.load_weights_from_tensors(*tensors(SHAPE), *mapping)

    return from_files if request.param == "files" else from_tensors


def make_in(checkpoint, shape: Shape, method: str):
    return make(shape, method, layer_idx=5, weight_path=checkpoint)


def logical(ids: "torch.Tensor", mapping: list[int]) -> "torch.Tensor":
    return torch.tensor(mapping)[ids]


@pytest.mark.parametrize("method", METHODS)
def test_slots_get_the_experts_of_the_map(checkpoint, load, method):
    plain = make_in(checkpoint, SHAPE, method)
    load(plain)
    for mapping, shape in ((MAP, SHAPE), (COPIES, WIDE)):
        wrapper = make_in(checkpoint, shape, method)
        load(wrapper, torch.tensor(mapping))
        assert wrapper.moe.loaded_experts == shape.experts
        x, ids, weights = batch(shape, 10)
        for physical in (ids, torch.arange(10)[:, None] % shape.experts + torch.zeros_like(ids)):  # every slot
            expected = plain.forward(x, logical(physical, mapping), weights)
            # The order of a sum is that of the physical ids: one f32 rounding, which may become one of bf16.
            torch.testing.assert_close(wrapper.forward(x, physical, weights), expected, rtol=2**-7, atol=2**-14)


@pytest.mark.parametrize("method", METHODS)
def test_one_expert_per_token_is_equal_to_the_bit(checkpoint, load, method):
    plain, wrapper = (make_in(checkpoint, shape, method) for shape in (SHAPE, WIDE))
    load(plain)
    load(wrapper, COPIES)
    x, ids, weights = batch(WIDE, 9)
    ids[:, 1] = -1
    expected = plain.forward(x, torch.where(ids < 0, ids, logical(ids.clamp(0), COPIES)), weights)
    assert same_bits(wrapper.forward(x, ids, weights), expected)


def test_any_kind_of_map(checkpoint, load):
    outs = []
    kinds = [
        MAP,
        tuple(MAP),
        torch.tensor(MAP),
        torch.tensor(MAP, dtype=torch.int32),
        torch.tensor(MAP).repeat_interleave(2)[::2],
        np.array(MAP),
    ]
    for mapping in kinds:
        wrapper = make_in(checkpoint, SHAPE, "AMXINT8")
        load(wrapper, mapping)
        outs.append(wrapper.forward(*batch(SHAPE, 9)))
    assert all(same_bits(out, outs[0]) for out in outs)
    wrapper = make_in(checkpoint, SHAPE, "AMXINT8")
    load(wrapper, None)
    assert not torch.equal(wrapper.forward(*batch(SHAPE, 9)), outs[0])
    identity = make_in(checkpoint, SHAPE, "AMXINT8")
    load(identity, torch.arange(4))
    assert same_bits(identity.forward(*batch(SHAPE, 9)), wrapper.forward(*batch(SHAPE, 9)))


REFUSED = [
    ([0, 1, 2], ValueError, "has 3 entries; it must have 4"),
    (torch.arange(5), ValueError, "has 5 entries; it must have 4"),
    ([0, 1, 2, 4], ValueError, r"\[3\] is 4; .* has 4 experts, 0\.\.3"),
    ([0, -1, 2, 3], ValueError, r"\[1\] is -1; .* has 4 experts, 0\.\.3"),
    (torch.tensor([0.0, 1.0, 2.0, 3.0]), TypeError, r"holds 0\.0; pass 4 integers"),
    ([0, 1, 2, "3"], TypeError, "holds '3'; pass 4 integers"),
    ([False, True, True, True], TypeError, "holds False; pass 4 integers"),
    (torch.arange(4)[None], TypeError, r"holds \[0, 1, 2, 3\]; pass 4 integers .* in one dimension"),
    (3, TypeError, "is a int; pass 4 integers"),
    (torch.tensor(3), TypeError, "is a Tensor; pass 4 integers"),
    ("0123", TypeError, "is a str; pass 4 integers"),
    ({0: 0}, TypeError, "is a dict; pass 4 integers"),
]


@pytest.mark.parametrize(("mapping", "kind", "words"), REFUSED)
def test_maps_that_cannot_be(checkpoint, load, mapping, kind, words):
    wrapper = make_in(checkpoint, SHAPE, "AMXINT8")
    with pytest.raises(kind, match="physical_to_logical.*" + words):
        load(wrapper, mapping)
    load(wrapper, MAP)
    assert wrapper.forward(*batch(SHAPE, 2)).shape == (2, SHAPE.hidden)


def test_a_map_that_has_no_values(checkpoint, load):
    wrapper = make_in(checkpoint, SHAPE, "AMXINT8")
    with pytest.raises(ValueError, match="physical_to_logical_map is on meta and has no values; pass a CPU tensor"):
        load(wrapper, torch.arange(4, device="meta"))


def test_more_slots_than_experts_need_a_map(checkpoint, load):
    with pytest.raises(ValueError, match=r"\[4\] is 4; .* has 4 experts"):
        load(make_in(checkpoint, WIDE, "AMXINT8"))


def test_a_map_and_a_mask_speak_of_slots(checkpoint, load):
    """Ids, the mask and skip_gpu_experts are physical."""
    wrapper = make(SHAPE, "AMXINT8", layer_idx=5, weight_path=checkpoint, num_gpu_experts=1, skip_gpu_experts=True)
    load(wrapper, MAP)
    plain = make_in(checkpoint, SHAPE, "AMXINT8")
    load(plain, MAP)
    assert wrapper.moe.loaded_experts == 3
    x, ids, weights = batch(SHAPE, 9)
    assert same_bits(wrapper.forward(x, ids, weights), plain.forward(x, torch.where(ids == 0, -1, ids), weights))

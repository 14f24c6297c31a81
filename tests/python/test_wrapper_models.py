"""Several models in one process: nothing of one is seen in the other."""

import pytest
from layer_reference import Shape
from wrapper_cases import batch, loaded, make, same_bits, tensors

from kt_kernel import KTMoEWrapper

ONE = Shape(experts=6, top_k=3, hidden=144, intermediate=200)
TWO = Shape(experts=4, top_k=2, hidden=80, intermediate=130)


def alone(shape: Shape, method: str, layers: int, tokens: int, **options) -> list:
    """What a model gives when it is the only one."""
    return [
        loaded(shape, method, seed=layer, layer_idx=layer, **options).forward(*batch(shape, tokens))
        for layer in range(layers)
    ]


def test_models_of_different_kind_interleaved(tmp_path):
    """Sizes, methods, folders, threads and batches differ; calls of one are submitted between those of the other."""
    first = {"method": "AMXINT8", "weight_path": tmp_path / "one", "cpuinfer_threads": 2, "threadpool_count": 1}
    second = {"method": "INT4G", "weight_path": tmp_path / "two", "cpuinfer_threads": 2, "threadpool_count": 2}
    expected = alone(ONE, layers=3, tokens=9, **first), alone(TWO, layers=3, tokens=4, **second)
    ones = [loaded(ONE, seed=layer, layer_idx=layer, **first) for layer in range(3)]
    twos = [loaded(TWO, seed=layer, layer_idx=layer, **second) for layer in range(3)]
    tokens_one, tokens_two = batch(ONE, 9), batch(TWO, 4)
    for _ in range(3):
        for layer, (one, two) in enumerate(zip(ones, twos, strict=True)):
            one.submit_forward(*tokens_one)
            two.submit_forward(*tokens_two)
            assert same_bits(one.sync_forward(tokens_one[0]), expected[0][layer])
            assert same_bits(two.sync_forward(tokens_two[0]), expected[1][layer])


def test_each_loads_from_its_own_folder(tmp_path):
    tokens = batch(TWO, 9)
    expected = []
    for seed in (0, 1):
        wrapper = make(TWO, "AMXINT8", weight_path=tmp_path / str(seed), cpu_save=True)
        wrapper.load_weights_from_tensors(*tensors(TWO, seed))
        expected.append(wrapper.forward(*tokens))
    wrappers = [make(TWO, "AMXINT8", weight_path=tmp_path / str(seed)) for seed in (0, 1)]
    for wrapper in wrappers:
        wrapper.load_weights()
    for wrapper, out in zip(wrappers, expected, strict=True):
        assert same_bits(wrapper.forward(*tokens), out)
    assert not same_bits(*expected)


def make_deferring(seed: int) -> list[KTMoEWrapper]:
    return [
        loaded(ONE, seed=seed + layer, layer_idx=layer, weight_path="/same", max_deferred_experts_per_token=2)
        for layer in range(3)
    ]


@pytest.mark.parametrize("tokens_of_second", [9, 4])
def test_the_same_model_twice_with_deferral(tokens_of_second):
    """The same folder, sizes and layers: what one leaves to its next layer does not go to the other's."""
    tokens, others = batch(ONE, 9), batch(ONE, tokens_of_second, seed=1)
    single = make_deferring(0)
    expected = [wrapper.forward(*tokens) for wrapper in single]
    del single
    single = make_deferring(10)
    expected_others = [wrapper.forward(*others) for wrapper in single]
    del single
    one, two = make_deferring(0), make_deferring(10)
    for _ in range(2):
        outs = [(a.forward(*tokens), b.forward(*others)) for a, b in zip(one, two, strict=True)]
        assert all(map(same_bits, [out for out, _ in outs], expected))
        assert all(map(same_bits, [out for _, out in outs], expected_others))


def test_a_model_that_is_made_again():
    """Layer by layer in place of the old one, as notebooks do."""
    tokens = batch(ONE, 9)
    model = make_deferring(0)
    expected = [wrapper.forward(*tokens) for wrapper in model]
    for layer in range(3):
        model[layer] = loaded(ONE, seed=layer, layer_idx=layer, weight_path="/same", max_deferred_experts_per_token=2)
    assert all(map(same_bits, [wrapper.forward(*tokens) for wrapper in model], expected))


def test_one_ends_while_the_other_works():
    tokens = batch(ONE, 9)
    one, two = make_deferring(0), make_deferring(0)
    expected = [wrapper.forward(*tokens) for wrapper in one]
    outs = []
    for wrapper in two:
        outs.append(wrapper.forward(*tokens))
        if one:
            one.pop().submit_forward(*tokens)
    assert all(map(same_bits, outs, expected))

import pytest

from kt_kernel.bench import shapes
from kt_kernel.bench.errors import BenchError


def test_parse_knows_the_names_and_custom_shapes():
    assert shapes.parse("dsv3") == shapes.Shape("dsv3", 32, 8, 7168, 2048)
    assert shapes.parse("4,2,64,32") == shapes.Shape("4x2x64x32", 4, 2, 64, 32)


@pytest.mark.parametrize("text", ["", "dsv4", "1,2,3", "1,2,3,4,5", "4,5,64,64", "4,0,64,64", "4,2,-1,64", "a,b,c,d"])
def test_parse_rejects_and_names_the_legal_ones(text):
    with pytest.raises(ValueError, match="dsv3, qwen3-30b, mixtral, gpt-oss, or E,K,H,I"):
        shapes.parse(text)


def test_flops_are_six_per_weight_pair():
    assert shapes.SHAPES["dsv3"].flops(16) == 6 * 7168 * 2048 * 8 * 16


def test_fit_leaves_experts_out_when_memory_is_short():
    shape = shapes.SHAPES["dsv3"]
    assert shapes.fit(shape, 100, 10**9) == shape
    assert shapes.fit(shape, 100, 2 * 16 * 100).experts == 16
    with pytest.raises(BenchError, match="dsv3 needs"):
        shapes.fit(shape, 100, 2 * 7 * 100)


def test_copies_go_four_times_beyond_the_cache_within_memory():
    shape = shapes.parse("4,2,64,64")
    assert shapes.layers_beyond_cache(shape, 1000, 4000, 10**9) == 4
    assert shapes.layers_beyond_cache(shape, 1000, 4000, 2 * 4000) == 1
    assert shapes.layers_beyond_cache(shape, 1000, 0, 10**9) == 1
    assert shapes.layers_beyond_cache(shape, 1, 10**9, 10**12) == 16

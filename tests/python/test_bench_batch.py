import numpy as np

from kt_kernel.bench import batch, shapes
from kt_kernel.bench.peers import TOLERANCE, relative_error, thread_counts

SHAPE = shapes.parse("8,3,64,32")


def test_a_batch_is_the_same_in_every_process():
    one, two = batch.Batch(SHAPE, 5), batch.Batch(SHAPE, 5)
    assert np.array_equal(one.input, two.input)
    assert all(np.array_equal(a, b) for a, b in zip(one.ids, two.ids, strict=True))


def test_routing_gives_every_token_different_experts():
    for ids in batch.Batch(SHAPE, 5).ids:
        assert ids.shape == (5, 3)
        assert ids.dtype == np.int64
        assert all(len(set(row)) == 3 for row in ids.tolist())
        assert 0 <= ids.min() <= ids.max() < 8


def test_unique_experts_of_one_token_are_its_top_k():
    assert batch.Batch(SHAPE, 1).unique_experts == 3


def test_weights_are_normal_and_differ_between_experts():
    gate, up, down = batch.expert_weights(shapes.parse("2,1,512,256"), 0)
    assert (gate.shape, up.shape, down.shape) == ((256, 512), (256, 512), (512, 256))
    values = batch.to_float(gate)
    assert abs(values.mean()) < 1e-3
    assert abs(values.std() * 512**0.5 - 1) < 0.01
    assert not np.array_equal(gate, batch.expert_weights(shapes.parse("2,1,512,256"), 1)[0])


def test_another_function_is_beyond_every_tolerance():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal(1000), rng.standard_normal(1000)
    assert relative_error(a, a) == 0
    assert relative_error(a, b) > max(TOLERANCE.values())


def test_thread_counts_are_possible_ones():
    counts = thread_counts()
    assert counts == sorted(set(counts), reverse=True)
    assert counts[-1] >= 1

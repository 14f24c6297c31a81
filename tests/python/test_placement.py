"""Which experts are on the GPU: strategies, and files that say how often experts were used."""

import pytest

from kt_kernel import expert_counts
from kt_kernel.expert_counts import read_expert_counts, write_expert_counts
from kt_kernel.placement import STRATEGIES, gpu_budget, place_experts
from kt_kernel.weights.config import layers_with_experts

torch = pytest.importorskip("torch", reason="torch is not installed: placement was not tested")

LAYERS, EXPERTS = 6, 8
MOE = [1, 2, 4]


def ids(masks, layer: int) -> list[int]:
    return masks[layer].nonzero().flatten().tolist()


@pytest.mark.parametrize("budget", [0, 1, 7, 12, 23, 24])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_as_many_as_the_budget_and_dense_layers_whole(strategy, budget):
    masks = place_experts(strategy, budget, MOE, LAYERS, EXPERTS)
    assert (masks.dtype, masks.shape, masks.device.type) == (torch.bool, (LAYERS, EXPERTS), "cpu")
    assert masks[MOE].sum() == budget
    assert masks[[0, 3, 5]].all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_budget_out_of_range_is_the_nearest(strategy):
    assert place_experts(strategy, -3, MOE, LAYERS, EXPERTS)[MOE].sum() == 0
    assert place_experts(strategy, 999, MOE, LAYERS, EXPERTS).all()


def test_uniform_gives_the_first_layers_one_more():
    masks = place_experts("uniform", 7, MOE, LAYERS, EXPERTS)
    assert [ids(masks, layer) for layer in MOE] == [[0, 1, 2], [0, 1], [0, 1]]


def test_front_loading_fills_layer_after_layer():
    masks = place_experts("front-loading", 11, MOE, LAYERS, EXPERTS)
    assert [ids(masks, layer) for layer in MOE] == [list(range(8)), [0, 1, 2], []]


def test_random_is_the_same_for_a_seed_and_not_the_first():
    first = place_experts("random", 9, MOE, LAYERS, EXPERTS)
    torch.rand(3)  # the generator of others
    assert torch.equal(first, place_experts("random", 9, MOE, LAYERS, EXPERTS))
    assert not torch.equal(first, place_experts("random", 9, MOE, LAYERS, EXPERTS, seed=7))
    assert not torch.equal(first, place_experts("uniform", 9, MOE, LAYERS, EXPERTS))
    drawn = torch.randperm(24, generator=torch.Generator().manual_seed(42))[:9]  # as sglang-kt draws
    assert sorted(drawn.tolist()) == first[MOE].view(-1).nonzero().flatten().tolist()


def test_frequency_takes_the_most_used_of_all_layers():
    counts = torch.zeros(LAYERS, EXPERTS)
    counts[0] = 100  # a dense layer: not asked
    counts[1, 5], counts[4, [2, 7]], counts[2, 0] = 9, torch.tensor([8.0, 7.0]), 1
    masks = place_experts("frequency", 3, MOE, LAYERS, EXPERTS, counts)
    assert [ids(masks, layer) for layer in MOE] == [[5], [], [2, 7]]


def test_what_cannot_be():
    with pytest.raises(
        ValueError, match="strategy='best'; it must be one of uniform, frequency, front-loading, random"
    ):
        place_experts("best", 1, MOE, LAYERS, EXPERTS)
    with pytest.raises(ValueError, match=r"moe_layers=\[1, 6\] must be different layers in 0\.\.5"):
        place_experts("uniform", 1, [1, 6], LAYERS, EXPERTS)
    with pytest.raises(ValueError, match=r"counts has shape \[3, 8\]; the model is \[6, 8\]"):
        place_experts("frequency", 1, MOE, LAYERS, EXPERTS, torch.zeros(3, EXPERTS))


def test_budgets():
    assert gpu_budget(3, None, EXPERTS, 4) == 12
    assert gpu_budget(None, 0.7, 10, 1) == 7
    assert gpu_budget(5, 0.0, EXPERTS, 4) == 0
    assert gpu_budget(None, 1.0, EXPERTS, 4) == 32
    assert gpu_budget(None, None, EXPERTS, 4) == 0
    with pytest.raises(ValueError, match=r"gpu_experts_ratio=1.5 is not in 0\.\.1"):
        gpu_budget(None, 1.5, EXPERTS, 4)
    with pytest.raises(ValueError, match="num_gpu_experts=9"):
        gpu_budget(9, None, EXPERTS, 4)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"first_k_dense_replace": 2, "moe_layer_freq": 2}, [2, 4]),
        ({"moe_layer_freq": [0, 1, 1, 0, 1, 0]}, [1, 2, 4]),
    ],
)
def test_layers_that_have_experts(fields, layers):
    assert list(layers_with_experts("config.json", fields, LAYERS)) == layers


class TestCounts:
    def test_there_and_back(self, tmp_path):
        counts = torch.randint(0, 100, (LAYERS, EXPERTS))
        write_expert_counts(tmp_path / "new" / "counts.pt", counts)
        assert torch.equal(read_expert_counts(tmp_path / "new" / "counts.pt", LAYERS, EXPERTS), counts.double())
        assert [file.name for file in (tmp_path / "new").iterdir()] == ["counts.pt"]

    def test_uses_are_counted_where_experts_are_called(self, tmp_path, monkeypatch):
        """As the embedded engine and transformers do with a prompt."""
        pytest.importorskip("transformers", reason="transformers is not installed: its plugin was not tested")
        from kt_kernel import KTMoEWrapper
        from kt_kernel.hf.forward import KTLayer

        counted = expert_counts.ExpertCounter(tmp_path / "counts.pt")
        counted.save()
        assert list(tmp_path.iterdir()) == []
        monkeypatch.setattr(expert_counts, "counter", lambda: counted)
        for index in (1, 3):
            wrapper = KTMoEWrapper(index, EXPERTS, 2, 64, 64, cpuinfer_threads=1, threadpool_count=1, method="BF16")
            wrapper.load_random_weights(0)
            for _ in range(2):
                KTLayer(wrapper)(torch.ones(2, 64), torch.tensor([[0, index], [-1, 7]]), torch.ones(2, 2))
        counted.save()
        counts = read_expert_counts(tmp_path / "counts.pt", 4, EXPERTS)
        assert counts.nonzero().tolist() == [[1, 0], [1, 1], [1, 7], [3, 0], [3, 3], [3, 7]]
        assert counts.sum() == 12

    def test_counting_is_asked_for_by_a_variable(self, tmp_path, monkeypatch):
        expert_counts.counter.cache_clear()
        assert expert_counts.counter() is None
        expert_counts.counter.cache_clear()
        monkeypatch.setenv("KT_KERNEL_RECORD_EXPERTS", str(tmp_path / "counts.pt"))
        assert expert_counts.counter() is expert_counts.counter()
        assert expert_counts.counter().path == tmp_path / "counts.pt"
        expert_counts.counter.cache_clear()

    @pytest.mark.parametrize("alone", [False, True])
    def test_steps_are_summed(self, tmp_path, alone):
        """What SGLang's recorder writes has more in it."""
        counts = torch.randint(0, 9, (3, LAYERS, EXPERTS), dtype=torch.int32)
        content = (
            counts if alone else {"rank": 0, "logical_count": counts, "average_utilization_rate_over_window": None}
        )
        torch.save(content, tmp_path / "counts.pt")
        found = read_expert_counts(tmp_path / "counts.pt", LAYERS, EXPERTS)
        assert torch.equal(found, counts.sum(0).double())

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ({"physical_count": 1}, "has physical_count, and no 'logical_count'"),
            ({"logical_count": [1]}, "is a list; it must be a tensor"),
            (torch.ones(2, 3), r"counts are \[2, 3\]; the model needs \[steps, 6, 8\]"),
            (torch.full((LAYERS, EXPERTS), -1), "numbers of at least 0"),
            (torch.full((LAYERS, EXPERTS), float("nan")), "numbers of at least 0"),
        ],
    )
    def test_other_files(self, tmp_path, content, message):
        torch.save(content, tmp_path / "counts.pt")
        with pytest.raises(ValueError, match=message):
            read_expert_counts(tmp_path / "counts.pt", LAYERS, EXPERTS)

    def test_no_file_and_no_file_of_torch(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"counts\.pt does not exist; needed is a \.pt file"):
            read_expert_counts(tmp_path / "counts.pt", LAYERS, EXPERTS)
        (tmp_path / "counts.pt").write_text("no")
        with pytest.raises(ValueError, match=r"counts\.pt is no file of torch\.save"):
            read_expert_counts(tmp_path / "counts.pt", LAYERS, EXPERTS)

    def test_wrong_shape_is_not_written(self, tmp_path):
        with pytest.raises(ValueError, match=r"counts has shape \[8\]"):
            write_expert_counts(tmp_path / "counts.pt", torch.ones(EXPERTS))
        assert list(tmp_path.iterdir()) == []

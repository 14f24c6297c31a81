"""select_deferred_experts against its definition, token by token."""

import hypothesis
import pytest
from hypothesis import strategies as st
from layer_reference import Shape
from wrapper_cases import make, torch

EXPERTS = 6
WRAPPER = make(Shape(experts=EXPERTS, top_k=4, hidden=16, intermediate=64))


def split(ids: list[list[int]], scores: list[list[float]], protected_k: int) -> tuple[list, list]:
    """An expert that is among the best protected_k of any token is immediate for all; ids that are none stay there."""
    protected = set()
    for row, row_scores in zip(ids, scores, strict=True):
        best = sorted(range(len(row)), key=lambda slot: -row_scores[slot])[: max(protected_k, 0)]
        protected |= {row[slot] for slot in best}
    is_now = [[expert in protected or not 0 <= expert < EXPERTS for expert in row] for row in ids]
    now = [[e if here else -1 for e, here in zip(*rows, strict=True)] for rows in zip(ids, is_now, strict=True)]
    later = [[-1 if here else e for e, here in zip(*rows, strict=True)] for rows in zip(ids, is_now, strict=True)]
    return now, later


@st.composite
def batches(draw):
    tokens, top_k = draw(st.integers(0, 5)), draw(st.integers(1, 4))
    ids = [[draw(st.integers(-2, EXPERTS + 1)) for _ in range(top_k)] for _ in range(tokens)]
    # Different within a token: among equals the order is not defined.
    scores = [draw(st.lists(st.integers(-20, 20), min_size=top_k, max_size=top_k, unique=True)) for _ in range(tokens)]
    return ids, scores, draw(st.integers(-1, top_k + 1)), top_k


@hypothesis.given(
    batches(), st.sampled_from([torch.int64, torch.int32]), st.sampled_from([torch.float32, torch.bfloat16])
)
def test_against_the_definition(case, id_type, score_type):
    ids, scores, protected_k, top_k = case
    tensors = (
        torch.tensor(ids, dtype=id_type).reshape(-1, top_k),
        torch.tensor(scores, dtype=score_type).reshape(-1, top_k),
    )
    now, later = WRAPPER.select_deferred_experts(*tensors, protected_k)
    assert (now.tolist(), later.tolist()) == split(ids, scores, protected_k)
    assert now.dtype == later.dtype == id_type
    assert tensors[0].tolist() == ids


@pytest.mark.parametrize("protected_k", [0, 4])
def test_none_and_all(protected_k):
    ids, scores = torch.tensor([[0, 1, 2, -1], [3, 5, 6, 4]]), torch.rand(2, 4)
    now, later = WRAPPER.select_deferred_experts(ids, scores, protected_k)
    if protected_k:
        assert torch.equal(now, ids)
        assert (later == -1).all()
    else:
        assert now.tolist() == [[-1, -1, -1, -1], [-1, -1, 6, -1]]
        assert later.tolist() == [[0, 1, 2, -1], [3, 5, -1, 4]]

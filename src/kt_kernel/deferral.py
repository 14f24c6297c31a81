"""Splitting a batch's experts into those done now and those left to the next layer, on tensors.

The wrapper itself does this natively, where the routing is anyway; this is for callers that want to see the split.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def split_experts(
    expert_ids: "torch.Tensor", expert_scores: "torch.Tensor", protected_k: int, num_experts: int
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """(immediate_ids, deferred_ids), each like ``expert_ids`` with -1 in the places that belong to the other.

    The ``protected_k`` largest scores of every token are protected, and an expert that any token protects is immediate
    for all of them. Ids outside 0..num_experts-1 are nobody's: they stay in the immediate part, and are skipped there.
    Nothing is copied to the host, so it can be captured in a CUDA graph.
    """
    import torch

    top_k = expert_ids.shape[-1]
    kept = min(max(int(protected_k), 0), top_k)
    real = (expert_ids >= 0) & (expert_ids < num_experts)
    # One more place than experts: where ids that are none go.
    place = torch.where(real, expert_ids, num_experts).to(torch.int64)
    protected = torch.zeros(num_experts + 1, dtype=torch.bool, device=expert_ids.device)
    if kept:
        slots = expert_scores.topk(kept, dim=-1).indices
        protected[place.gather(-1, slots).reshape(-1)] = True
    immediate = protected[place] | ~real
    none = torch.full_like(expert_ids, -1)
    return torch.where(immediate, expert_ids, none), torch.where(immediate, none, expert_ids)

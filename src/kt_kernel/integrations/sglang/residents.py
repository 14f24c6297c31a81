"""Which experts of a layer are on the GPU: n of E, in n places, as a mask for the CPU and a table for the GPU."""

import torch


class Residents:
    """`mask` bool [E] and `ids`, ascending, on the host; place p of the GPU's tensors holds expert `ids[p]`.

    On the device: `table` int32 [E + 1], the place of each expert or -1, and -1 at its end, where an id of -1 leads;
    `device_ids` int64 [n]. Both are changed in place only: captured graphs read them.
    """

    def __init__(self, mask: torch.Tensor):
        self.mask = mask.clone()
        self.ids = mask.nonzero().flatten().tolist()
        self.count, self.num_experts = len(self.ids), mask.numel()
        self.table: torch.Tensor | None = None
        self.device_ids: torch.Tensor | None = None

    def place(self, expert: int) -> int:
        """Place of an expert, or -1."""
        return self.ids.index(expert) if bool(self.mask[expert]) else -1

    def others(self) -> list[int]:
        """Experts that are not on the GPU."""
        return (~self.mask).nonzero().flatten().tolist()

    def to(self, device: torch.device) -> None:
        """Makes the tensors of the device, once."""
        if self.table is None:
            self.table = torch.empty(self.num_experts + 1, dtype=torch.int32, device=device)
            self.device_ids = torch.empty(self.count, dtype=torch.int64, device=device)
            self.move(torch.tensor(self.ids, dtype=torch.int64, device="cpu").to(device))

    def places(self, expert_ids: torch.Tensor) -> torch.Tensor:
        """Places of routed ids, -1 for experts of the CPU and for ids of -1."""
        return self.table[expert_ids].to(expert_ids.dtype)

    def most_used(self, expert_ids: torch.Tensor) -> torch.Tensor:
        """The n experts that occur most in `expert_ids`, ascending, int64 [n] on the device; the host does not wait.

        Among equals those that are here stay, then the smaller id comes first.
        """
        experts = self.num_experts
        routed = expert_ids.reshape(-1).long()
        routed = torch.where((routed >= 0) & (routed < experts), routed, experts)
        uses = torch.zeros(experts + 1, dtype=torch.int64, device=routed.device)
        uses.scatter_add_(0, routed, torch.ones_like(routed))
        here = (self.table[:experts] >= 0).long()
        order = torch.arange(experts - 1, -1, -1, device=routed.device)
        rank = (uses[:experts] * 2 + here) * experts + order
        return rank.topk(self.count).indices.sort().values

    def move(self, ids: torch.Tensor) -> None:
        """Device: experts `ids`, ascending, are those of the places from now on."""
        self.device_ids.copy_(ids)
        self.table.fill_(-1)
        self.table[ids] = torch.arange(self.count, dtype=torch.int32, device=ids.device)

    def move_on_host(self, ids: list[int]) -> None:
        self.ids = ids
        self.mask.zero_()
        self.mask[ids] = True

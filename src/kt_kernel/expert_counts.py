"""Files that say how often each expert was used: what placement by frequency reads.

A ``.pt`` file of torch.save, read with weights_only: a dict with "logical_count", or that tensor alone; integers or
floats [steps, layers, experts], or [layers, experts]. SGLang's recorder of expert distributions writes such files.
"""

import atexit
import functools
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from kt_kernel import env
from kt_kernel.weights.whole_file import WholeFile

if TYPE_CHECKING:
    import torch

KEY = "logical_count"


class ExpertCounter:
    """Counts how often experts are used, layer by layer, and writes it when the process ends."""

    def __init__(self, path: "str | os.PathLike[str]"):
        self.path = Path(path)
        self._uses: dict[int, torch.Tensor] = {}
        atexit.register(self.save)

    def add(self, layer: int, expert_ids: "torch.Tensor", num_experts: int) -> None:
        import torch

        ids = expert_ids.detach().reshape(-1).to(device="cpu", dtype=torch.int64)
        uses = torch.bincount(ids[(ids >= 0) & (ids < num_experts)], minlength=num_experts)
        self._uses[layer] = uses if layer not in self._uses else self._uses[layer] + uses

    def save(self) -> None:
        """Writes what was counted, rows up to the last layer that has experts; nothing if nothing was."""
        import torch

        if not self._uses:
            return
        experts = max(uses.numel() for uses in self._uses.values())
        counts = torch.zeros(max(self._uses) + 1, experts, dtype=torch.int64)
        for layer, uses in self._uses.items():
            counts[layer, : uses.numel()] = uses
        write_expert_counts(self.path, counts)


@functools.cache
def counter() -> ExpertCounter | None:
    """The one of this process, if KT_KERNEL_RECORD_EXPERTS asks for it."""
    path = env.record_experts()
    return None if path is None else ExpertCounter(path)


def read_expert_counts(path: "str | os.PathLike[str]", num_layers: int, num_experts: int) -> "torch.Tensor":
    """Uses of each expert, float64 [num_layers, num_experts], summed over the steps of the file."""
    import torch

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; needed is a .pt file with counts of experts")
    try:
        found = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch raises many kinds for files that are none of its own
        raise ValueError(f"{path} is no file of torch.save with tensors alone ({error})") from None
    if isinstance(found, dict):
        if KEY not in found:
            raise ValueError(f"{path} has {', '.join(map(str, found)) or 'nothing'}, and no {KEY!r}")
        found = found[KEY]
    if not isinstance(found, torch.Tensor):
        raise ValueError(f"{path}: {KEY!r} is a {type(found).__name__}; it must be a tensor")
    counts = found.to(torch.float64)
    if counts.dim() == 3:
        counts = counts.sum(0)
    if list(counts.shape) != [num_layers, num_experts]:
        raise ValueError(
            f"{path}: counts are {list(found.shape)}; the model needs [steps, {num_layers}, {num_experts}], layers "
            "without experts included"
        )
    if not bool(torch.isfinite(counts).all()) or bool((counts < 0).any()):
        raise ValueError(f"{path}: counts must be numbers of at least 0")
    return counts


def write_expert_counts(path: "str | os.PathLike[str]", counts: "torch.Tensor") -> None:
    """Writes counts [layers, experts], as one step; the file is there whole or not at all."""
    import torch

    if counts.dim() != 2:
        raise ValueError(f"counts has shape {list(counts.shape)}; it must be [layers, experts]")
    content = io.BytesIO()
    torch.save({KEY: counts.detach().to("cpu").unsqueeze(0).contiguous()}, content)
    path = Path(path)
    with WholeFile(path, content.tell(), "counts of experts", f"{path.name}.tmp") as file:
        file.write_at(0, content.getbuffer())

"""Files that say how often each expert was used: what placement by frequency reads.

A ``.pt`` file of torch.save, read with weights_only: a dict with "logical_count", or that tensor alone; integers or
floats [steps, layers, experts], or [layers, experts]. SGLang's recorder of expert distributions writes such files.
"""

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from kt_kernel.weights.whole_file import WholeFile

if TYPE_CHECKING:
    import torch

KEY = "logical_count"


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

"""The tensors of a demo model that is there, as f32."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kt_kernel.weights.floats import to_f32
from kt_kernel.weights.tensor_files import TensorFiles

# Matrices of an expert: what checkpoints of Mixtral call them, and what everybody else does.
PROJECTIONS = {"gate": "w1", "up": "w3", "down": "w2"}


class DemoTensors:
    """A context manager: at its end the files are closed."""

    def __init__(self, path: Path):
        self.path = path
        self.config: dict = json.loads((path / "config.json").read_text())
        self._files = TensorFiles(path)

    def __enter__(self) -> "DemoTensors":
        return self

    def __exit__(self, *_) -> None:
        self._files.__exit__()

    def tensor(self, name: str) -> np.ndarray:
        """f32."""
        return to_f32(self._files.array(name, ["BF16"], self._files.entry(name).shape))

    def expert_names(self, layer_idx: int, projection: str) -> Iterator[str]:
        for expert in range(self.config["num_local_experts"]):
            yield f"model.layers.{layer_idx}.block_sparse_moe.experts.{expert}.{PROJECTIONS[projection]}.weight"

    def experts(self, layer_idx: int, projection: str) -> np.ndarray:
        """f32 [E, N, K]."""
        return np.stack([self.tensor(name) for name in self.expert_names(layer_idx, projection)])

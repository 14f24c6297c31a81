"""Small checkpoints to convert, and someone who watches a conversion."""

import json
from pathlib import Path

import numpy as np
from layer_reference import Shape
from weight_files import checkpoint_tensors, originals, write_safetensors

from kt_kernel.convert import Outcome, Settings, convert

SHAPE = Shape(experts=4, top_k=2, hidden=96, intermediate=160)
LAYERS = (1, 2, 4)


class Watcher:
    """An Observer that remembers."""

    def __init__(self):
        self.notes, self.begun, self.advanced, self.layers = [], [], 0, []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def begin(self, what: str, total: int) -> None:
        self.begun.append((what, total))

    def advance(self, count: int) -> None:
        self.advanced += count

    def finished(self, layer_idx: int, record: dict) -> None:
        self.layers.append(layer_idx)


def config(shape: Shape = SHAPE, layers: int = 5, **others) -> dict:
    return {
        "model_type": "qwen3_moe",
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "hidden_size": shape.hidden,
        "moe_intermediate_size": shape.intermediate,
        "num_hidden_layers": layers,
        **others,
    }


def write_model(folder: Path, layers=LAYERS, shape: Shape = SHAPE, naming: str = "separate", **others) -> Path:
    """One file per layer; experts of layer L are originals(shape, seed=L). `others` go into config.json."""
    for layer in layers:
        tensors = checkpoint_tensors(originals(shape, seed=layer), f"model.layers.{layer}", naming)
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = np.zeros((shape.experts, shape.hidden), np.uint16)
        write_safetensors(folder / f"model-{layer}.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config(shape, **others)))
    return folder


def run(source: Path, output: Path, quant_method: str = "int8", **options) -> tuple[Outcome, Watcher]:
    watcher = Watcher()
    return convert(Settings(source, output, quant_method, **options), watcher), watcher


def manifest(folder: Path) -> dict:
    return json.loads((folder / "kt-conversion.json").read_text())


def contents(folder: Path) -> dict[str, bytes]:
    """Without the manifest, which has times."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "kt-conversion.json"}

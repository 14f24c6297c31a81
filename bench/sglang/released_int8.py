"""int8 experts of a checkpoint, written by kt-kernel 0.7.2 itself, which cannot read another's; ours reads them too.

python released_int8.py MODEL FOLDER THREADS     where kt-kernel 0.7.2 is installed, beside a GPU
"""

import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open

from kt_kernel import KTMoEWrapper

_MATRICES = ("gate_proj", "up_proj", "down_proj")


def main(model: Path, folder: Path, threads: int) -> None:
    config = json.loads((model / "config.json").read_text())
    files = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    experts = config["num_experts"]
    folder.mkdir(parents=True, exist_ok=True)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts."
        with safe_open(model / files[f"{prefix}0.gate_proj.weight"], "pt") as file:
            matrices = [
                torch.stack([file.get_tensor(f"{prefix}{expert}.{name}.weight") for expert in range(experts)])
                for name in _MATRICES
            ]
        wrapper = KTMoEWrapper(
            layer_idx=layer,
            num_experts=experts,
            num_experts_per_tok=config["num_experts_per_tok"],
            hidden_size=config["hidden_size"],
            moe_intermediate_size=config["moe_intermediate_size"],
            gpu_experts_mask=None,
            cpuinfer_threads=threads,
            threadpool_count=1,
            weight_path=str(folder),
            chunked_prefill_size=512,
            cpu_save=True,
            method="AMXINT8",
        )
        wrapper.load_weights_from_tensors(*matrices, torch.arange(experts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))

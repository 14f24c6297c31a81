"""The tiny model with experts in 4 bits, as compressed-tensors writes them, and what it should say.

    python int4_model.py FOLDER      writes the checkpoint and FOLDER/reference.json: float32, of the same values

Of 32 columns of a matrix: code = round(w / scale) in -8..7, scale = max|w| / 7 in bf16; eight codes, plus 8 each, in an
int32, the first in its lowest bits.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import models

GROUP = 32
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": GROUP,
                "dynamic": False,
                "actorder": None,
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
}


def quantise(matrix) -> tuple[dict, "object"]:
    """(parts of the file by the end of their name, float32 values)"""
    import torch

    rows, columns = matrix.shape
    groups = matrix.float().view(rows, columns // GROUP, GROUP)
    scales = (groups.abs().amax(2) / 7).bfloat16()
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7)
    eights = codes.view(rows, columns // 8, 8).to(torch.int64) + 8
    words = (eights << (4 * torch.arange(8))).sum(-1)
    packed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    parts = {"_packed": packed, "_scale": scales, "_shape": torch.tensor([rows, columns])}
    return parts, (codes * scales.float()[..., None]).view(rows, columns)


def write_int4(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        exact = Path(temporary)
        models.write_checkpoint(exact, models.SHAPES["tiny"])
        weight_map = {}
        for file in sorted(exact.glob("*.safetensors")):
            packed, values = {}, {}
            for name, tensor in load_file(file).items():
                parts, values[name] = quantise(tensor) if ".experts." in name else ({"": tensor}, tensor)
                packed |= {name + end: part.contiguous() for end, part in parts.items()}
            save_file(packed, folder / file.name, metadata={"format": "pt"})
            save_file(values, file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(packed, file.name)
        models.write_reference(exact)
        for file in exact.glob("*.json"):
            shutil.copy(file, folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    write_int4(parser.parse_args().folder)


if __name__ == "__main__":
    main()

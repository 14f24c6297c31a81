"""A model that is loaded with KTConfig costs its packed experts and the rest of it: never the experts twice."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from weight_files import write_safetensors

pytest.importorskip("transformers", reason="transformers is not installed: its plugin was not tested")

HIDDEN, INTERMEDIATE, EXPERTS, LAYERS, HEADS, VOCABULARY = 1024, 512, 32, 4, 8, 1024  # 403 MB of experts in bf16
EXPERT_WEIGHTS = LAYERS * EXPERTS * 3 * INTERMEDIATE * HIDDEN
# Pages of the allocator, the pool, Python objects; and of libraries: how many a fault maps depends on how the page
# cache holds a file (14 MB more were seen where it was just written). A second copy of a layer is 50 MB.
MARGIN = 32 << 20

MEASURE = """
import sys
import torch
from transformers import Qwen3MoeForCausalLM
from kt_kernel.hf import KTConfig

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))

torch.set_num_threads(1)
before = peak()
rest = packed = 0
if len(sys.argv) > 1:
    config = KTConfig(sys.argv[2], threads=2, subpools=1)
    model = Qwen3MoeForCausalLM.from_pretrained(sys.argv[1], quantization_config=config)
    rest = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    layers = [module.kt_layer.wrapper.moe for module in model.modules() if hasattr(module, "kt_layer")]
    packed = sum(layer.packed_bytes_per_expert * layer.num_experts for layer in layers)
print(peak(), packed, rest)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    write_checkpoint(folder)
    yield folder
    (folder / "model.safetensors").unlink()


def write_checkpoint(folder: Path) -> None:
    """A Qwen3-MoE in bf16. What the weights are does not matter: random signs and mantissas, one exponent."""
    from transformers import Qwen3MoeConfig

    Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        num_experts=EXPERTS,
        num_experts_per_tok=4,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HIDDEN // HEADS,
        vocab_size=VOCABULARY,
        dtype="bfloat16",
    ).save_pretrained(folder)
    rng = np.random.default_rng(0)
    bits = {}

    def weights(*shape: int) -> np.ndarray:
        if shape not in bits:
            bits[shape] = rng.integers(0, 1 << 16, shape, np.uint16) & 0x807F | 0x3C00
        return bits[shape]

    tensors = {f"{name}.weight": weights(VOCABULARY, HIDDEN) for name in ("model.embed_tokens", "lm_head")}
    tensors["model.norm.weight"] = weights(HIDDEN)
    for layer in range(LAYERS):
        base = f"model.layers.{layer}"
        tensors |= {f"{base}.self_attn.{part}_proj.weight": weights(HIDDEN, HIDDEN) for part in "qkvo"}
        tensors |= {f"{base}.self_attn.{part}_norm.weight": weights(HIDDEN // HEADS) for part in "qk"}
        tensors |= {f"{base}.{name}_layernorm.weight": weights(HIDDEN) for name in ("input", "post_attention")}
        tensors[f"{base}.mlp.gate.weight"] = weights(EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            stem = f"{base}.mlp.experts.{expert}"
            tensors |= {f"{stem}.{part}_proj.weight": weights(INTERMEDIATE, HIDDEN) for part in ("gate", "up")}
            tensors[f"{stem}.down_proj.weight"] = weights(HIDDEN, INTERMEDIATE)
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"}, None)


def measure(*arguments: object) -> list[int]:
    command = [sys.executable, "-c", MEASURE, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return [int(number) for number in result.stdout.split()]


@pytest.fixture(scope="module")
def baseline() -> int:
    return measure()[0]


@pytest.mark.parametrize(("method", "bytes_per_weight"), [("BF16", 2), ("AMXINT8", 1)])
def test_peak_while_loading(method, bytes_per_weight, checkpoint, baseline):
    peak, packed, rest = measure(checkpoint, method)
    assert packed == pytest.approx(bytes_per_weight * EXPERT_WEIGHTS, rel=0.02)
    assert peak - baseline < 1.1 * packed + rest + MARGIN

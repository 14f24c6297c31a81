"""A transformers model on a GPU whose experts are on the CPU, or some on either."""

import pytest

try:
    from kt_kernel.hf import KTConfig
except ImportError as error:  # it says which version it needs
    pytest.skip(f"{error}; the plugin was not tested on a GPU", allow_module_level=True)

import torch
from transformers import AutoConfig, AutoModelForCausalLM

EXPERTS, VOCABULARY = 8, 64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCABULARY,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2, generator=generator)
    folder = tmp_path_factory.mktemp("qwen3_moe")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, experts_implementation="eager")
    with torch.no_grad():
        return model.cuda()(tokens()).logits


def tokens() -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(3)).cuda()


@pytest.mark.parametrize("placed", ["moved", "device_map"])
@pytest.mark.parametrize("gpu_experts", [0, 3, EXPERTS])
def test_experts_on_either_side(gpu_experts, placed, checkpoint, expected):
    options = {}
    if placed == "device_map":
        pytest.importorskip("accelerate", reason="accelerate is not installed, which device_map needs")
        options["device_map"] = "cuda"
    config = KTConfig(threads=4, subpools=1, gpu_experts=gpu_experts)
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, quantization_config=config, **options
    ).cuda()
    with torch.no_grad():
        logits = model(tokens()).logits
    errors = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 0.02  # a token whose router found two experts equally good may take the other
    assert all(buffer.is_cuda for name, buffer in model.named_buffers() if "kt_gpu_experts" in name)
    assert model.generate(tokens(), max_new_tokens=4, do_sample=False).shape == (1, 13)

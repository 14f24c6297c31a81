"""config.json of families: as they are on the hub, and damaged."""

import json

import pytest

from kt_kernel.weights import model_config

# What the file says, and what we read: experts, top k, hidden, intermediate, layers, and which of them have experts.
KNOWN = {
    "deepseek_v3": (
        {
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "first_k_dense_replace": 3,
            "moe_layer_freq": 1,
        },
        (256, 8, 7168, 2048, 61, range(3, 61)),
    ),
    "qwen3_moe": (
        {
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        (128, 8, 2048, 768, 48, range(48)),
    ),
    "mixtral": (
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
        },
        (8, 2, 4096, 14336, 32, range(32)),
    ),
    "llama4": (
        {
            "text_config": {
                "model_type": "llama4_text",
                "num_local_experts": 128,
                "num_experts_per_tok": 1,
                "hidden_size": 5120,
                "intermediate_size": 8192,
                "intermediate_size_mlp": 16384,
                "num_hidden_layers": 48,
                "interleave_moe_layer_step": 2,
            },
            "vision_config": {"hidden_size": 1408},
        },
        (128, 1, 5120, 8192, 48, range(1, 48, 2)),
    ),
    "jamba": (
        {
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        },
        (16, 2, 4096, 14336, 32, range(1, 32, 2)),
    ),
    "ernie4_5_moe": (
        {
            "moe_num_experts": 64,
            "moe_k": 6,
            "hidden_size": 2560,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 28,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
        },
        (64, 6, 2560, 1536, 28, range(1, 28)),
    ),
    "hunyuan_v1_moe": (
        {
            "num_experts": 64,
            "moe_topk": [8, 8, 8],
            "hidden_size": 4096,
            "intermediate_size": 3072,
            "moe_intermediate_size": [3072, 3072, 3072],
            "num_hidden_layers": 3,
        },
        (64, 8, 4096, 3072, 3, range(3)),
    ),
    "mimo_v2_flash": (
        {
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "hidden_size": 4096,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 4,
            "moe_layer_freq": [0, 1, 1, 1],
        },
        (256, 8, 4096, 2048, 4, range(1, 4)),
    ),
    "step3": (
        {
            "text_config": {
                "moe_num_experts": 48,
                "moe_top_k": 3,
                "hidden_size": 7168,
                "intermediate_size": 18432,
                "moe_intermediate_size": 5120,
                "num_hidden_layers": 6,
                "moe_layers_enum": "4,5",
            }
        },
        (48, 3, 7168, 5120, 6, range(4, 6)),
    ),
    "qwen3_omni_moe": (
        {
            "thinker_config": {
                "text_config": {
                    "num_experts": 128,
                    "num_experts_per_tok": 8,
                    "hidden_size": 2048,
                    "moe_intermediate_size": 768,
                    "num_hidden_layers": 48,
                }
            }
        },
        (128, 8, 2048, 768, 48, range(48)),
    ),
}
MIXTRAL = KNOWN["mixtral"][0]


def read(folder, fields):
    (folder / "config.json").write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return model_config(folder)


@pytest.mark.parametrize("family", KNOWN)
def test_a_family(family, tmp_path):
    fields, expected = KNOWN[family]
    config = read(tmp_path, {"model_type": family, **fields})
    assert config.model_type == family
    sizes = config.num_experts, config.num_experts_per_tok, config.hidden_size, config.moe_intermediate_size
    assert (*sizes, config.num_layers, config.moe_layers) == (*expected[:-1], tuple(expected[-1]))
    assert (config.activation, config.swiglu_limit, config.swiglu_alpha) == ("silu", 0.0, 0.0)


def test_the_file_itself_and_the_activation(tmp_path):
    read(tmp_path, MIXTRAL | {"hidden_act": "gelu", "swiglu_limit": 7, "swiglu_alpha": 1.702})
    config = model_config(str(tmp_path / "config.json"))
    assert (config.activation, config.swiglu_limit, config.swiglu_alpha) == ("gelu", 7.0, 1.702)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("{", "JSON is damaged"),
        ("[" * 100000, "JSON is damaged"),
        ("[]", "not an object"),
        ({"hidden_size": 64, "num_hidden_layers": 2}, "has no num_experts or n_routed.*is it a model with experts"),
        (MIXTRAL | {"num_local_experts": "8"}, "num_local_experts is '8'; needed is one whole number"),
        (MIXTRAL | {"num_local_experts": True}, "num_local_experts is True"),
        (MIXTRAL | {"num_local_experts": 0}, "num_local_experts is 0"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "9 experts per token, but there are 8"),
        (MIXTRAL | {"hidden_size": None}, "has no hidden_size$"),
        (MIXTRAL | {"intermediate_size": [64, 96]}, r"intermediate_size is \[64, 96\]"),
        (MIXTRAL | {"swiglu_limit": "7"}, "swiglu_limit is '7'"),
        (MIXTRAL | {"first_k_dense_replace": 32}, "none of 32 layers has experts"),
        (MIXTRAL | {"moe_layer_freq": [1]}, "which layers have experts cannot be read"),
        (MIXTRAL | {"decoder_sparse_step": 0}, "which layers have experts cannot be read"),
        (MIXTRAL | {"moe_layers_enum": "a"}, "which layers have experts cannot be read"),
    ],
)
def test_a_file_that_says_nothing_useful(fields, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, fields)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        model_config(tmp_path)
    with pytest.raises(FileNotFoundError, match="absent does not exist"):
        model_config(tmp_path / "absent")

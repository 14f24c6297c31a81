"""scripts/convert_gpu_weights.py: what needs no llmcompressor. Which modules stay as they are, on toy models."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
from convert_cases import config

from kt_kernel.convert import ConvertError, gpu_weights

SCRIPT = Path(__file__).parents[2] / "scripts" / "convert_gpu_weights.py"

# In memory the experts of transformers 5 are no linear layers, so that every linear layer must be left alone.
LEFT = """
import json, sys, tempfile
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import family_models, torch
from kt_kernel.convert import gpu_weights
found = {}
for family, arguments in family_models.FAMILIES.items():
    model = family_models._make(family, arguments)
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        patterns = gpu_weights.ignored(model.config.model_type, gpu_weights.dense_layers(Path(folder)))
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    found[family] = [name for name in names if not gpu_weights.is_ignored(name, patterns)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def left():
    pytest.importorskip("transformers", minversion="5", reason="transformers 5 is not installed: no toy models")
    done = subprocess.run([sys.executable, "-c", LEFT, Path(__file__).parent], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_all_but_experts_are_left_alone_in_every_family(left):
    assert {family: names for family, names in left.items() if names} == {}
    assert len(left.keys() & gpu_weights.FAMILIES.keys()) >= 15


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "mixtral", "gpt_oss", "llama4", "unheard_of"])
def test_experts_are_quantised(family):
    patterns = gpu_weights.ignored(family, [0])
    for block in ("mlp", "block_sparse_moe", "feed_forward"):
        for matrix in ("gate_proj", "up_proj", "down_proj", "w1"):
            assert not gpu_weights.is_ignored(f"model.layers.3.{block}.experts.7.{matrix}", patterns)
    assert gpu_weights.is_ignored("lm_head", patterns)
    assert gpu_weights.is_ignored("model.layers.0.mlp.up_proj", patterns)
    assert not gpu_weights.is_ignored("model.layers.10.mlp.experts.0.up_proj", patterns)


def test_more_patterns_are_the_users():
    patterns = gpu_weights.ignored("qwen3_moe", (), ["re:.*experts\\.3\\..*", "model.layers.1.mlp.experts.0.up_proj"])
    assert gpu_weights.is_ignored("model.layers.9.mlp.experts.3.up_proj", patterns)
    assert gpu_weights.is_ignored("model.layers.1.mlp.experts.0.up_proj", patterns)
    assert not gpu_weights.is_ignored("model.layers.1.mlp.experts.0.down_proj", patterns)


def test_dense_layers(tmp_path):
    assert gpu_weights.dense_layers(tmp_path) == []
    (tmp_path / "config.json").write_text(json.dumps(config(first_k_dense_replace=2)))
    assert gpu_weights.dense_layers(tmp_path) == [0, 1]


def test_pieces_of_a_text():
    assert gpu_weights.windows([], 4, 3) == []
    assert gpu_weights.windows([1, 2, 3], 4, 3) == [[1, 2, 3]]
    assert gpu_weights.windows(range(9), 4, 5) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert gpu_weights.windows(range(40), 4, 3) == [[0, 1, 2, 3], [12, 13, 14, 15], [24, 25, 26, 27]]


def test_rows_of_a_data_set():
    def join(messages):
        return "+".join(message["content"] for message in messages)

    assert gpu_weights.text_of({"messages": [{"content": "a"}, {"content": "b"}]}, join) == "a+b"
    assert gpu_weights.text_of({"text": "c", "id": 1}, join) == "c"
    with pytest.raises(ConvertError, match="its rows have question, answer; needed is 'messages'"):
        gpu_weights.text_of({"question": "", "answer": ""}, join)


def given(tmp_path, *more) -> argparse.Namespace:
    return gpu_weights.parser().parse_args(["--model_id", "m", "--output_dir", str(tmp_path / "out"), *more])


def test_defaults_are_those_of_the_readmes(tmp_path):
    found = vars(given(tmp_path))
    assert (found["quant_method"], found["quant_type"], found["dampening_frac"]) == ("GPTQ", "W8A16", 0.1)
    assert (found["num_calibration_samples"], found["max_sequence_length"]) == (512, 2048)
    assert (found["dataset"], found["dataset_split"]) == ("HuggingFaceH4/ultrachat_200k", "train_sft")


def test_what_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_weights, "missing_packages", list)
    gpu_weights.check(given(tmp_path))
    with pytest.raises(ConvertError, match="--max_sequence_length must be at least 1"):
        gpu_weights.check(given(tmp_path, "--max_sequence_length", "0"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("")
    with pytest.raises(ConvertError, match="out is not empty; choose another folder"):
        gpu_weights.check(given(tmp_path))


def test_without_the_optional_packages_one_line_says_so(tmp_path):
    if not gpu_weights.missing_packages():
        pytest.skip("all optional packages are installed")
    command = [sys.executable, SCRIPT, "--model_id", tmp_path, "--output_dir", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "llmcompressor" in done.stderr
    assert "pip install 'kt-kernel[convert]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("widths", "size"), [((2048, 768), 128), ((576, 192), 64), ((2048, 96), 32)])
def test_the_largest_group_that_divides(widths, size):
    assert gpu_weights.group_size_for(widths) == size


def test_widths_that_no_group_divides():
    with pytest.raises(ConvertError, match="48, 2048 columns wide"):
        gpu_weights.group_size_for((2048, 48))

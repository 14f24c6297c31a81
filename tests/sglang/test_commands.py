"""The commands of docs/sglang.md start a server as they are written.

Only paths are filled in, and what a small machine without a GPU needs is put behind.
"""

import json
import re
import shlex
import subprocess
import sys

import checks
import gguf
import numpy as np
import pytest
import torch
from conftest import ROOT
from engines import Process
from run import plugin_variables
from safetensors import safe_open
from server import Server, free_port

PAGE = ROOT / "docs/sglang.md"
ON_CPU = (
    "--device cpu --attention-backend torch_native --disable-cuda-graph --disable-overlap-schedule --host 127.0.0.1"
)
SMALL = "--dtype bfloat16 --max-total-tokens 4096 --chunked-prefill-size 512 --kt-cpuinfer 2 --kt-threadpool-count 1"
OWN = 4  # experts that SGLang computes; the pages' 32 are more than the tiny model has
START_SECONDS = 300


def commands() -> list[list[str]]:
    blocks = re.findall(
        r"^```bash\n(python -m sglang\.launch_server.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    return [shlex.split(block.replace("\\\n", " "))[1:] for block in blocks]


def method_of(command: list[str]) -> str:
    return command[command.index("--kt-method") + 1]


class CommandServer(Server):
    def __init__(self, place, words: list[str], log, **variables: str):
        self.port = free_port()
        Process.__init__(self, place, [*words, "--port", str(self.port)], log, variables)


@pytest.fixture(scope="module")
def places(tiny, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("weights")
    convert = [sys.executable, ROOT / "scripts/convert_cpu_weights.py", "--input-path", tiny, "--input-type", "bf16"]
    subprocess.run([*convert, "--output", folder / "int8", "--quant-method", "int8"], check=True)
    _write_gguf(tiny, folder / "gguf")
    return {
        "/path/to/model": str(tiny),
        "/path/to/int8": str(folder / "int8"),
        "/path/to/gguf": str(folder / "gguf"),
    }


def _write_gguf(model, folder) -> None:
    """The experts in Q8_0."""
    folder.mkdir()
    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(folder / "model.gguf", "qwen3moe")
    for layer in range(config["num_hidden_layers"]):
        with safe_open(model / f"model-layer-{layer}.safetensors", "pt") as file:
            for name in ("gate", "up", "down"):
                prefix = f"model.layers.{layer}.mlp.experts"
                matrices = [file.get_tensor(f"{prefix}.{e}.{name}_proj.weight") for e in range(config["num_experts"])]
                codes = gguf.quants.quantize(torch.stack(matrices).float().numpy(), gguf.GGMLQuantizationType.Q8_0)
                writer.add_tensor(
                    f"blk.{layer}.ffn_{name}_exps.weight",
                    np.ascontiguousarray(codes),
                    raw_dtype=gguf.GGMLQuantizationType.Q8_0,
                )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_there_is_one_for_each_kind_of_weights():
    assert [method_of(command) for command in commands()] == ["BF16", "AMXINT8", "LLAMAFILE"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", commands(), ids=method_of)
def test_a_command_as_written(place, places, reference, tmp_path, command):
    words = [places.get(word, word) for word in command]
    extra = [*shlex.split(f"{ON_CPU} {SMALL}"), "--kt-num-gpu-experts", str(OWN)]
    exact = "--kt-max-deferred-experts-per-token" not in words
    server = CommandServer(place, [*words, *extra], tmp_path / "log", **plugin_variables(place, "cpu"))
    try:
        server.wait_until_up(START_SECONDS)
        answers = [server.generate(row) for row in reference]
        assert not exact or checks.wrong_tokens(reference, answers) == []
        assert all(len(answer["ids"]) == len(row["output_ids"]) for answer, row in zip(answers, reference, strict=True))
        name = command[command.index("--served-model-name") + 1]
        assert name in json.dumps(server.models())
    finally:
        server.kill()

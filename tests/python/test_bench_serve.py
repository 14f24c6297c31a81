"""kt bench serve: its arithmetic, models without weights, and one small run from end to end."""

import json
import math
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kt_kernel import _core
from kt_kernel.bench import errors, llamacpp_build, serve, side, synthetic
from kt_kernel.bench.client import Client
from kt_kernel.bench.http_side import HttpSide
from kt_kernel.bench.prompts import prompt
from kt_kernel.cli.main import main
from kt_kernel.weights.tensor_files import TensorFiles

SMALL = replace(synthetic.TINY_48, layers=2)


def test_every_side_gets_its_turn_in_every_round():
    calls = []

    def measure(name, rate):
        return lambda seed: calls.append((name, seed)) or rate

    rates = serve.in_turns({"engine": measure("engine", 2.0), "stock": measure("stock", 1.0)}, 2)
    assert rates == {"engine": [2.0, 2.0], "stock": [1.0, 1.0]}
    assert calls == [(name, seed) for seed in range(3) for name in ("engine", "stock")]


def test_ratios_are_medians_over_rounds_not_ratios_of_medians():
    values = serve.compared({"engine": [10.0, 20.0, 90.0], "stock": [5.0, 40.0, 30.0]})
    assert values == {"tokens_per_s": 20.0, "stock_tokens_per_s": 30.0, "vs_stock": 2.0}


def test_layers_of_the_large_model_by_memory():
    full = synthetic.QWEN3_30B
    assert serve.layers_that_fit(full, 20_000_000_000) == full.layers
    some = serve.layers_that_fit(full, 10_000_000_000)
    assert 20 < some < 30
    assert serve.layers_that_fit(full, 1_000_000_000) == 0
    # 30.5 billion weights, 3.3 of them active, as its makers say
    weights = full.layers * (full.expert_weights + full.other_weights) + 2 * full.vocabulary * full.hidden
    assert weights == pytest.approx(30.5e9, rel=0.01)


def test_prompts_are_the_same_for_all_and_different_from_each_other():
    assert prompt(1, 2, 8, 1000) == prompt(1, 2, 8, 1000)
    assert len({tuple(prompt(seed, index, 8, 1000)) for seed in range(4) for index in range(4)}) == 16
    assert all(256 <= token < 1000 for token in prompt(0, 0, 100, 1000))


@pytest.fixture
def tokenizer_files(tmp_path):
    folder = tmp_path / "demo"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text("{}")
    return folder


def test_a_large_checkpoint_takes_no_room(tmp_path, tokenizer_files):
    folder = synthetic.write_checkpoint(replace(synthetic.QWEN3_30B, layers=2), tmp_path / "large", tokenizer_files)
    files = list(folder.iterdir())
    assert sum(file.stat().st_size for file in files) > 3.7e9
    assert sum(file.stat().st_blocks * 512 for file in files) < 2e6
    with TensorFiles(folder) as tensors:
        name = "model.layers.1.mlp.experts.127.down_proj.weight"
        assert not tensors.array(name, ["BF16"], (2048, 768)).any()


def test_sides_are_where_the_table_says():
    for module, name in side.SIDES.values():
        assert hasattr(__import__(f"kt_kernel.{module}", fromlist=[name]), name)


def test_a_run_gives_the_overhead_of_the_engine(monkeypatch, capsys, demo_path):
    monkeypatch.setattr(synthetic, "TINY_48", SMALL)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", "--parts", "overhead", "--rounds", "1", "--steps", "4", "--threads", "1", "--json"])
    run = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0, run["notes"]
    (figure,) = run["figures"]
    assert (figure["part"], figure["phase"], figure["batch"]) == ("serve", "overhead", 1)
    assert 0 < figure["experts_us"] < figure["token_us"]
    assert figure["decoder"] in ("native", "transformers")


TINY_LATENT = synthetic.DeepseekV2(2, 64, 8, 2, 64, 1, 96, 4, 32, 16, 16, 16, 1024)


def test_a_run_compares_decoders_of_latents(monkeypatch, capsys, demo_path):
    monkeypatch.setattr(synthetic, "DEEPSEEK_V2_LITE", TINY_LATENT)
    monkeypatch.setattr(serve, "LATENT_PROMPTS", (8,))
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", "--parts", "latent", "--rounds", "1", "--steps", "4", "--threads", "1", "--json"])
    run = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0, run["notes"]
    (figure,) = run["figures"]
    assert figure["model"] == "deepseek-v2-lite, 2 of 2 layers"
    assert (figure["phase"], figure["decoder"]) == ("decode behind 8 tokens", "native")
    assert figure["vs_transformers"] > 0


def test_deepseek_v2_lite_has_the_size_that_its_makers_say():
    full = synthetic.DEEPSEEK_V2_LITE
    shapes = [shape for layer in range(full.layers) for shape in full.layer_shapes(layer).values()]
    weights = sum(math.prod(shape) for shape in shapes) + 2 * full.vocabulary * full.hidden
    assert weights == pytest.approx(15.7e9, rel=0.01)


class Streams(BaseHTTPRequestHandler):
    """Stands for the server: a token every 10 ms, or, for prompts of one token, an error."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        failed = len(asked["prompt"]) == 1
        self.send_response(400 if failed else 200)
        self.end_headers()
        for _ in range(0 if failed else asked["max_tokens"]):
            self.wfile.write(b'data: {"choices": []}\n\n')
            time.sleep(0.01)
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


@pytest.fixture
def http_side():
    with ThreadingHTTPServer(("127.0.0.1", 0), Streams) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        made = HttpSide()
        made._address, made._vocabulary = f"127.0.0.1:{server.server_port}", 1000
        yield made
        server.shutdown()


@pytest.mark.parametrize("batch", [1, 3])
def test_streams_are_counted_together(http_side, batch):
    rate = http_side.decode(seed=0, batch=batch, prompt_tokens=4, steps=20)["tokens_per_s"]
    assert 0.2 * 100 * batch < rate < 1.05 * 100 * batch


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_streams_that_fail_are_no_figure(http_side):
    with pytest.raises(RuntimeError, match="of 2 streams 2 failed"):
        http_side.decode(seed=0, batch=2, prompt_tokens=1, steps=20)


@pytest.mark.parametrize("command", [["serve"], ["quality"]])
def test_without_transformers_the_way_out_is_told(monkeypatch, capsys, command):
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        main(["bench", *command])
    assert ended.value.code == 1
    assert "tokenizers and transformers not found: pip install 'kt-kernel[engine]'" in capsys.readouterr().err


def test_a_part_that_is_unknown(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", "--parts", "demo,lunch"])
    assert ended.value.code == 2
    assert "'lunch' is not one of demo, http, overhead, large, latent" in capsys.readouterr().err


@pytest.mark.skipif(
    not llamacpp_build.is_model_built(),
    reason=f"llama.cpp is not built in {llamacpp_build.model_folder()}: kt bench serve builds it",
)
def test_llamacpp_runs_the_same_model(demo_path, tmp_path):
    pytest.importorskip("gguf")
    tokenizers = pytest.importorskip("tokenizers")
    from kt_kernel.demo.copies import write_gguf

    tokenizer = tokenizers.Tokenizer.from_file(str(demo_path / "tokenizer.json"))
    path = write_gguf(demo_path, tmp_path / "demo.gguf", "bf16")
    variant = next(v.name for v in _core.variants() if v.runnable and v.name in llamacpp_build.MODULES)
    folder, module = str(llamacpp_build.model_folder()), llamacpp_build.module_of(variant)
    with Client("llamacpp_model", folder, module) as client:
        client.call("open", path=str(path), vocabulary=49152, threads=1, sequences=1, context=64, batch=64)
        answer = client.call("answer", tokens=tokenizer.encode("The capital of France is").ids, steps=2)
    assert tokenizer.decode(answer) == " Paris."

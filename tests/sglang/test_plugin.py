"""The plugin in the installed SGLang: its options in the real parser and record, its layers in the whole engine."""

import json
import subprocess

import checks
import pytest
import rows
from engines import Engine
from run import plugin_variables

START_SECONDS = 240
ASK_SECONDS = 240

FLAGS = (
    *("--kt-gpu-prefill-token-threshold", "64", "--kt-enable-dynamic-expert-update"),
    *("--kt-expert-placement-strategy", "random", "--kt-gpu-experts-ratio", "0.25", "--kt-numa-nodes", "0"),
    *("--record-kt-gpu-expert-distribution", "--expert-distribution-recorder-mode", "stat"),
)
# Prints what a server would be started with, after a way through pickle: it goes to the scheduler's process so.
PARSE = """
import json, pickle, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import ServerArgs, prepare_server_args
record = pickle.loads(pickle.dumps(prepare_server_args(sys.argv[1:])))
names = [name for name in ServerArgs.__annotations__ if name not in ("random_seed", "port", "nccl_port")]
found = {name: repr(getattr(record, name, None)) for name in names}
options = getattr(record, "_kt_options", None)
print("RECORD " + json.dumps([found, None if options is None else vars(options)]))
"""


@pytest.fixture
def parse(place, tiny):
    """(words, variables) -> [fields of the record, our options]; a str is how the parser refused."""

    def run(*words: str, **variables: str):
        known = ("--model-path", str(tiny), "--device", "cpu", "--random-seed", "1")
        done = subprocess.run(
            [place.python, "-W", "ignore", "-c", PARSE, *known, *words],
            env=place.environment(**plugin_variables(place, "cpu"), **variables),
            capture_output=True,
            text=True,
        )
        found = [line for line in done.stdout.splitlines() if line.startswith("RECORD ")]
        return json.loads(found[0][7:]) if found else done.stderr

    return run


@pytest.mark.timeout(300)
def test_options(parse, tiny):
    weights = ("--kt-weight-path", str(tiny), "--kt-method", "BF16", "--kt-threadpool-count", "1")
    record, options = parse(*weights, *FLAGS)
    assert options == {
        "kt_gpu_prefill_token_threshold": 64,
        "kt_enable_dynamic_expert_update": True,
        "kt_expert_placement_strategy": "random",
        "kt_gpu_experts_ratio": 0.25,
        "kt_numa_nodes": [0],
        "record_kt_gpu_expert_distribution": True,
        "statistics": None,
    }
    assert record["disable_prefill_cuda_graph"] == record["disable_shared_experts_fusion"] == "True"
    assert "error: --kt-enable-dynamic-expert-update moves experts" in parse(
        *weights, "--kt-enable-dynamic-expert-update"
    )


@pytest.mark.timeout(300)
def test_without_weights_the_record_is_that_of_sglang_alone(parse):
    alone, _ = parse(SGLANG_PLUGINS="sglang_on_cpu")
    record, options = parse()
    assert options is None
    assert record == alone


@pytest.mark.timeout(900)
def test_tokens_are_those_of_float32_with_experts_that_are_sent_and_moved(place, tiny, reference, tmp_path):
    """Every prompt is long enough to be streamed. The second time experts lie where the first left them.

    The record says so: experts moved, and each layer of a pass had the number that was asked for on the GPU.
    """
    row = next(row for row in rows.ROWS if row.name == "plugin, recorded")
    options = row.engine_options(str(tiny), str(tiny), "cpu") | {"kt_cpuinfer": 2}
    folder = tmp_path / "record"
    variables = {**plugin_variables(place, "cpu", row), checks.RECORDER_FOLDER: str(folder)}
    engine = Engine(place, options, tmp_path / "log", **variables)
    try:
        engine.wait_until_up(START_SECONDS)
        found = checks.check_recorded(
            lambda call, **given: engine.call(call, ASK_SECONDS, **given), reference, folder, "BF16"
        )
    finally:
        engine.kill()
    assert found["wrong"] == []

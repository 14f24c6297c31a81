"""Options that the plugin adds to SGLang's, and how they get into its record of arguments; SGLang is a stand-in."""

import argparse
import logging
import pickle
import subprocess
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest

from kt_kernel.integrations.sglang import engine, hooks, options

PATH = {"kt_weight_path": "/model"}


def parsed(*words: str) -> dict:
    parser = argparse.ArgumentParser(exit_on_error=False)
    options.add_flags(parser)
    return vars(parser.parse_args(words))


def test_flags_and_defaults():
    assert options.options_from(parsed() | PATH) == options.DEFAULTS
    found = parsed(
        *(
            "--kt-gpu-prefill-token-threshold",
            "512",
            "--kt-enable-dynamic-expert-update",
            "--kt-gpu-experts-ratio",
            "0.3",
        ),
        *("--kt-expert-placement-strategy", "front-loading", "--kt-numa-nodes", "0", "1"),
        "--record-kt-gpu-expert-distribution",
    )
    assert options.options_from(found | PATH | {"kt_threadpool_count": 2}) == options.Options(
        512, True, "front-loading", 0.3, (0, 1), True
    )


@pytest.mark.parametrize(
    "words",
    [
        ("--kt-gpu-experts-ratio", "1.1"),
        ("--kt-gpu-prefill-token-threshold", "-1"),
        ("--kt-expert-placement-strategy", "best"),
        ("--kt-numa-nodes",),
    ],
)
def test_what_the_parser_refuses(words):
    with pytest.raises(argparse.ArgumentError):
        parsed(*words)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kt_enable_dynamic_expert_update": True}, "it needs --kt-gpu-prefill-token-threshold"),
        ({"kt_numa_nodes": [0, 1], "kt_threadpool_count": 1}, "names 2 nodes and --kt-threadpool-count is 1"),
        ({"kt_gpu_experts_ratio": -0.5}, r"-0.5 is not in 0\.\.1"),
        ({"kt_expert_placement_strategy": "best"}, "choose uniform, frequency, front-loading, random"),
        ({"kt_gpu_prefill_token_threshold": -5}, r"must be 0 \(off\) or more"),
        (
            {"kt_expert_placement_strategy": "frequency", "init_expert_location": "/no/counts.pt"},
            "--init-expert-location /no/counts.pt: no such file",
        ),
    ],
)
def test_what_does_not_fit_together(values, message):
    with pytest.raises(ValueError, match=message):
        options.options_from(values)


def test_options_of_sglang_that_change(tmp_path):
    counts = tmp_path / "counts.pt"
    counts.touch()
    values = {
        "disable_prefill_cuda_graph": False,
        "disable_shared_experts_fusion": True,
        "init_expert_location": str(counts),
        "kt_expert_placement_strategy": "frequency",
        "kt_gpu_experts_ratio": 0.5,
        "kt_num_gpu_experts": 4,
    }
    found = options.options_from(values)
    assert found.statistics == str(counts)
    changed = options.changes(found, values)
    assert {name: value for name, (value, _) in changed.items()} == {
        "disable_prefill_cuda_graph": True,
        "init_expert_location": "trivial",
        "kt_num_gpu_experts": None,
    }
    assert options.changes(options.DEFAULTS, {}) == {}  # options that this SGLang does not have


# In SGLang


class Registry:
    """What SGLang's registry does with the hooks of one plugin."""

    def __init__(self):
        self.targets: dict[str, list] = {}

    def register(self, target, hook, kind):
        self.targets.setdefault(target, []).append((hook, kind))

    def hook(self, end: str):
        return next(hook for target, [(hook, _)] in self.targets.items() if target.endswith(end))


@dataclass
class ServerArgs:
    model_path: str = ""
    kt_weight_path: str | None = None
    kt_num_gpu_experts: int | None = None
    kt_threadpool_count: int = 2
    disable_prefill_cuda_graph: bool = False
    disable_shared_experts_fusion: bool = False
    init_expert_location: str = "trivial"
    expert_distribution_recorder_mode: str | None = None

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", default="")
        parser.add_argument("--kt-weight-path")
        parser.add_argument("--disable-prefill-cuda-graph", action="store_true")
        parser.add_argument("--disable-shared-experts-fusion", action="store_true")
        parser.add_argument("--expert-distribution-recorder-mode")

    @classmethod
    def from_cli_args(cls, namespace):
        names = cls.__dataclass_fields__
        return cls(**{name: value for name, value in vars(namespace).items() if name in names})


class Engine:
    server_args_class = ServerArgs


@pytest.fixture
def sglang(monkeypatch):
    """Stand-ins for the modules that every process of SGLang loads; the registry."""
    registry = Registry()
    kinds = SimpleNamespace(BEFORE=0, AFTER=1, AROUND=2, REPLACE=3)
    modules = {
        "sglang": {"__version__": "0.5.99"},
        "sglang.srt": {},
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": registry, "HookType": kinds},
        "sglang.srt.server_args": {"ServerArgs": ServerArgs},
        "sglang.srt.entrypoints": {},
        "sglang.srt.entrypoints.engine": {"Engine": type("Engine", (Engine,), {})},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__path__ = []
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(engine, "NEEDED", ())
    return registry


def through_the_parser(registry: Registry, *words: str) -> ServerArgs:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    registry.hook("add_cli_args")(None, parser)
    return registry.hook("from_cli_args")(ServerArgs.from_cli_args.__func__, ServerArgs, parser.parse_args(words))


def test_the_command_line(sglang):
    hooks.register()
    record = through_the_parser(sglang, "--kt-weight-path", "/m", "--kt-gpu-prefill-token-threshold", "9")
    assert record._kt_options == options.Options(9)
    assert record.disable_prefill_cuda_graph
    assert record.disable_shared_experts_fusion
    assert pickle.loads(pickle.dumps(record))._kt_options == record._kt_options  # to the scheduler's process


def test_without_weights_nothing_changes(sglang, caplog):
    hooks.register()
    record = through_the_parser(sglang, "--model-path", "/m")
    assert vars(record) == vars(ServerArgs("/m"))
    assert caplog.text == ""
    record = through_the_parser(sglang, "--model-path", "/m", "--kt-gpu-experts-ratio", "0.5")
    assert vars(record) == vars(ServerArgs("/m"))
    assert "--kt-gpu-experts-ratio: nothing without --kt-weight-path" in caplog.text


def test_an_error_of_the_command_line_is_one_line(sglang):
    hooks.register()
    with pytest.raises(SystemExit, match=r"^error: --kt-enable-dynamic-expert-update moves experts"):
        through_the_parser(sglang, "--kt-weight-path", "/m", "--kt-enable-dynamic-expert-update")


def test_arguments_of_an_engine(sglang):
    hooks.register()
    make = sys.modules["sglang.srt.entrypoints.engine"].Engine.server_args_class
    assert vars(make(model_path="/m")) == vars(ServerArgs("/m"))
    record = make(model_path="/m", kt_weight_path="/m", kt_gpu_experts_ratio=0.5)
    assert record._kt_options == options.Options(kt_gpu_experts_ratio=0.5)
    assert record.disable_prefill_cuda_graph
    with pytest.raises(TypeError, match="kt_unknown"):
        make(kt_unknown=1)


RECORD = "--record-kt-gpu-expert-distribution"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), f"{RECORD} needs --kt-weight-path"),
        (("--expert-distribution-recorder-mode", "stat"), f"{RECORD} needs --kt-weight-path"),
        (("--kt-weight-path", "/m"), "it needs --expert-distribution-recorder-mode stat, per_pass or per_token"),
    ],
)
def test_a_record_that_could_never_be_written_is_refused(sglang, words, message):
    hooks.register()
    with pytest.raises(SystemExit, match=rf"^error: .*{message}"):
        through_the_parser(sglang, RECORD, *words)


def test_the_record(sglang, monkeypatch, caplog):
    """On the command line and in an engine; an SGLang without such a recorder is told of, and goes on."""
    hooks.register()
    mode = {"expert_distribution_recorder_mode": "per_pass"}
    make = sys.modules["sglang.srt.entrypoints.engine"].Engine.server_args_class
    monkeypatch.setattr(engine, "NEEDED_TO_RECORD", ())
    words = ("--kt-weight-path", "/m", RECORD, "--expert-distribution-recorder-mode", "per_pass")
    for record in (
        through_the_parser(sglang, *words),
        make(kt_weight_path="/m", record_kt_gpu_expert_distribution=True, **mode),
    ):
        assert record._kt_options.record_kt_gpu_expert_distribution
        assert record.expert_distribution_recorder_mode == "per_pass"
    assert not [entry for entry in caplog.records if entry.levelno >= logging.WARNING]
    monkeypatch.setattr(engine, "NEEDED_TO_RECORD", ("sglang.srt.nowhere.thing",))
    assert make(kt_weight_path="/m", record_kt_gpu_expert_distribution=True, **mode)._kt_options is not None
    assert f"lacks sglang.srt.nowhere.thing, which kt-kernel needs for {RECORD}" in caplog.text


def test_processes_that_do_not_compute_get_options_only(sglang):
    hooks.register()
    assert len(sglang.targets) == 2


def test_an_sglang_that_lacks_something_is_left_alone(sglang, monkeypatch, caplog):
    monkeypatch.delattr(sys.modules["sglang.srt.plugins.hook_registry"], "HookRegistry")
    monkeypatch.setattr(engine, "NEEDED_FOR_OPTIONS", (*engine.NEEDED_FOR_OPTIONS, "sglang.srt.nowhere.thing"))
    hooks.register()
    assert sglang.targets == {}
    assert "SGLang 0.5.99 lacks sglang.srt.plugins.hook_registry.HookRegistry.register, sglang.srt.nowhere.thing" in (
        caplog.text
    )
    assert "tried with 0.5.17 and 0.5.23" in caplog.text


def test_a_computing_process_that_lacks_something(sglang, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, engine.METHOD_MODULE, ModuleType(engine.METHOD_MODULE))
    monkeypatch.setattr(engine, "NEEDED", (f"{engine.METHOD_MODULE}.KTEPWrapperMethod.apply",))
    hooks.register()
    assert len(sglang.targets) == 2
    assert f"lacks {engine.METHOD_MODULE}.KTEPWrapperMethod.apply" in caplog.text


def test_an_sglang_with_such_options_of_its_own(sglang, monkeypatch, caplog):
    caplog.set_level("INFO", logger="kt_kernel.sglang")
    monkeypatch.setitem(ServerArgs.__annotations__, options.NAMES[0], int)
    hooks.register()
    assert sglang.targets == {}
    assert "has options of its own" in caplog.text


def test_nothing_of_sglang_is_imported_with_the_package():
    code = (
        "import sys, kt_kernel, kt_kernel.integrations.sglang;"
        "print(sorted(m for m in sys.modules if m.startswith('sglang') or m == 'torch'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

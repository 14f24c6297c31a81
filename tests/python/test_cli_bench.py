import json

import pytest

from kt_kernel import _core
from kt_kernel.bench import shapes, wheel
from kt_kernel.bench.errors import BenchError
from kt_kernel.cli import bench_options
from kt_kernel.cli.main import main

TINY = ["--shape", "4,2,64,64", "--tokens", "1,3", "--seconds", "0.02"]


def kt(*arguments):
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    return end.value.code


@pytest.mark.parametrize(
    ("arguments", "option", "legal"),
    [
        (["kernels", "--formats", "bf17"], "--formats", "bf16, int8, int4, int4g"),
        (["kernels", "--tokens", "0"], "--tokens", "1 to 16384"),
        (["kernels", "--tokens", "1,x"], "--tokens", "1 to 16384"),
        (["kernels", "--tokens", "16385"], "--tokens", "1 to 16384"),
        (["kernels", "--shape", "dsv4"], "--shape", "dsv3, qwen3-30b, mixtral, gpt-oss"),
        (["kernels", "--shape", ""], "--shape", "dsv3"),
        (["kernels", "--variant", "sse"], "--variant", "avx2"),
        (["kernels", "--threads", "100000"], "--threads", "1 to "),
        (["kernels", "--threads", "0"], "--threads", "1"),
        (["kernels", "--seconds", "0"], "--seconds", "0.01"),
        (["limits", "--machine", "a/b"], "--machine", "letters"),
        (["peers", "--formats", "int4g"], "--formats", "bf16, int8, int4"),
        (["peers", "--peer-path", "/nowhere"], "--peer-path", "unpack"),
        (["peers", "--against", "fp8"], "--against", "bf16, int8, int4, int4g"),
        (["peers", "--against", "int4", "--formats", "fp8"], "--formats", "bf16, int8, int4, int4g"),
        (["--formats", "bf17"], "--formats", "bf16, int8, int4, int4g"),
        (["--json", "limits"], "bench", "behind 'limits'"),
        (["--no-such-option"], "--no-such-option", ""),
    ],
)
def test_wrong_usage_is_one_line_that_names_the_option(capsys, arguments, option, legal):
    assert kt("bench", *arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.strip().splitlines()) == 1
    assert option in said.err
    assert legal in said.err


def test_help_and_version(capsys):
    assert kt() == 0
    assert "bench" in capsys.readouterr().out
    assert kt("bench", "--help") == 0
    assert "peers" in capsys.readouterr().out
    assert kt("--version") == 0
    assert capsys.readouterr().out.startswith("kt-kernel ")


@pytest.mark.parametrize("texts", [["dsv3", "8,2,64,32"], ["dsv3 8,2,64,32"]])
def test_shapes_of_one_option_or_several(texts):
    found = bench_options.shape_list(texts)
    assert [shape.experts for shape in found] == [shapes.SHAPES["dsv3"].experts, 8]


def test_kernels_as_json(capsys):
    assert kt("bench", "kernels", *TINY, "--formats", "bf16,int4", "--json") == 0
    run = json.loads(capsys.readouterr().out)
    assert [(f["format"], f["tokens"]) for f in run["figures"]] == [("bf16", 1), ("bf16", 3), ("int4", 1), ("int4", 3)]
    assert all(f["us"] > 0 and f["read_share"] > 0 for f in run["figures"])
    assert {f["variant"] for f in run["figures"]} == set(run["limits"])


def test_bench_alone_prints_tables_and_saves(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    variant = next(v.name for v in reversed(_core.variants()) if v.runnable)
    assert kt("bench", *TINY, "--formats", "int8", "--variant", variant, "--save", "--machine", "box") == 0
    said = capsys.readouterr().out
    assert "limits" in said
    assert "4x2x64x64" in said
    kept = json.loads((tmp_path / "bench/results/box.json").read_text())
    assert list(kept["limits"]) == [variant]
    assert len(kept["figures"]) == 2


def test_peer_module_of_another_variant_is_named(tmp_path):
    (tmp_path / "kt_kernel").mkdir()
    (tmp_path / "kt_kernel" / "_kt_kernel_ext_amx.cpython-31-x.so").touch()
    with pytest.raises(BenchError, match=r"variant 'avx2'.*holds: amx"):
        wheel.native_module(tmp_path, "avx2")


def test_a_peer_that_does_not_load_fails_with_the_reason(capsys, tmp_path):
    (tmp_path / "kt_kernel").mkdir()
    arguments = ["--peer-path", str(tmp_path), "--variant", "emu", *TINY]
    assert kt("bench", "peers", *arguments) == 1
    assert "no module for variant 'emu'" in capsys.readouterr().out


def test_hybrid_without_a_gpu_says_what_to_do(capsys, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kt("bench", "hybrid", *TINY) == 1
    assert "hybrid needs a GPU" in capsys.readouterr().err


def test_a_format_beside_another_of_ours(capsys):
    arguments = ["--against", "int4", "--formats", "int4g,int8", "--variant", "emu", *TINY]
    assert kt("bench", "peers", *arguments, "--json") == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert [f["format"] for f in figures] == ["int4g", "int4g", "int8", "int8"]
    assert {f["peer"] for f in figures} == {"our int4"}
    assert all(0.05 < f["error_between"] < 0.4 for f in figures)  # what int4 loses, and nothing of it twice

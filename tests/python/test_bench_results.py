import json
import sys

import pytest

from kt_kernel.bench import results, roofline
from kt_kernel.bench.errors import BenchError
from kt_kernel.bench.run import Findings


def figure(variant="avx2", tokens=1, us=10.0, part="kernels", **more):
    fields = {"part": part, "shape": "dsv3", "variant": variant, "format": "bf16", "tokens": tokens, "threads": 2}
    return {**fields, "us": us, "intensity": float(tokens), "tflops": 0.1 * tokens, **more}


def run_of(*figures, limits=None):
    limits = limits or {f["variant"]: {"threads": 2, "read_gbps": 30.0, "peaks": {"fma_f32": 2e11}} for f in figures}
    return results.document(Findings(limits, list(figures)), "1.2.3")


def test_document_has_the_schema():
    run = run_of(figure())
    assert list(run) == ["schema", "date", "version", "machine", "limits", "figures", "notes"]
    assert json.loads(json.dumps(run)) == run


def test_save_writes_one_file_per_variant_and_merges(tmp_path):
    first = results.save(run_of(figure(), figure("emu")), tmp_path, None)
    assert len(first) == 2
    assert all(path.stem.endswith(("-avx2", "-emu")) for path in first)
    results.save(run_of(figure(us=5.0), figure(tokens=16)), tmp_path, None)
    kept = json.loads(next(p for p in first if p.stem.endswith("-avx2")).read_text())
    assert [(f["tokens"], f["us"]) for f in kept["figures"]] == [(1, 5.0), (16, 10.0)]
    assert all(f["version"] == "1.2.3" and f["date"] for f in kept["figures"])
    assert list(kept["limits"]) == ["avx2"]


def test_a_peer_figure_replaces_the_older_one_whatever_its_threads():
    old, new = (run_of(figure(part="peers", peer="llama.cpp", threads=n)) for n in (1, 2))
    assert [f["threads"] for f in results.merge(old, new)["figures"]] == [2]
    other = run_of(figure(part="peers", peer="our int4"))
    assert [f["peer"] for f in results.merge(old, other)["figures"]] == ["llama.cpp", "our int4"]


def test_figures_are_sorted_by_token_count_not_by_text():
    merged = results.merge({}, run_of(figure(tokens=16), figure(tokens=2), figure(tokens=2048)))
    assert [f["tokens"] for f in merged["figures"]] == [2, 16, 2048]


def test_machine_name_is_the_file_name(tmp_path):
    assert results.save(run_of(figure()), tmp_path, "box") == [tmp_path / "box.json"]


def test_an_unknown_schema_is_not_overwritten(tmp_path):
    (tmp_path / "box.json").write_text('{"schema": 99}')
    with pytest.raises(BenchError, match="schema 99"):
        results.save(run_of(figure()), tmp_path, "box")


def test_plot_writes_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    roofline.plot(run_of(figure(), figure(tokens=16)), tmp_path / "new" / "roof.png")
    assert (tmp_path / "new" / "roof.png").read_bytes().startswith(b"\x89PNG")


def test_plot_says_why_not(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(BenchError, match="pip install"):
            roofline.plot(run_of(figure()), tmp_path / "roof.png")
    pytest.importorskip("matplotlib")
    with pytest.raises(BenchError, match="kernels"):
        roofline.plot(run_of(figure(part="peers")), tmp_path / "roof.png")

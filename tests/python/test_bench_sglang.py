"""The harness of bench/sglang, as far as it needs no engine: what it calls right, and its processes."""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

HARNESS = Path(__file__).parents[2] / "bench/sglang"


@pytest.fixture(autouse=True)
def harness(monkeypatch):
    """Its files are scripts beside each other, with names that others may have too."""
    monkeypatch.syspath_prepend(str(HARNESS))
    for path in HARNESS.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    yield
    for path in HARNESS.glob("*.py"):
        sys.modules.pop(path.stem, None)


REFERENCE = [
    {"prompt_ids": [1], "output_ids": [5, 6, 7], "logprobs": [-1.0, -2.0, -3.0], "leads": [2.0, 0.1, 2.0]},
    {"prompt_ids": [2], "output_ids": [8, 9, 10], "logprobs": [-1.0, -1.0, -1.0], "leads": [2.0, 2.0, 2.0]},
]


def answers(*ids: list[int]) -> list[dict]:
    return [{"ids": row} for row in ids]


class TestChecks:
    def test_the_same_tokens_are_right(self):
        import checks

        assert checks.wrong_tokens(REFERENCE, answers([5, 6, 7], [8, 9, 10])) == []

    def test_a_near_tie_excuses_what_follows_it_but_nothing_else(self):
        import checks

        assert checks.wrong_tokens(REFERENCE, answers([5, 0, 0], [8, 9, 10])) == []
        assert checks.wrong_tokens(REFERENCE, answers([0, 6, 7], [8, 9, 0])) == [
            "prompt 0, token 0: 0, not 5, which leads by 2.00",
            "prompt 1, token 2: 0, not 10, which leads by 2.00",
        ]

    def test_an_answer_that_is_too_short_is_no_answer(self):
        import checks

        with pytest.raises(ValueError, match="zip"):
            checks.wrong_tokens(REFERENCE, answers([5, 6], [8, 9, 10]))

    @pytest.mark.parametrize("moved", [0.05, 0.2, math.nan])
    def test_log_probs(self, moved):
        import checks

        def ask(call, rows):
            if call == "greedy":
                return answers(*(row["output_ids"] for row in rows))
            return [[value + moved for value in row["logprobs"]] for row in rows]

        assert checks.check_engine(ask, REFERENCE, "BF16")["ok"] == (moved == 0.05)

    def test_a_request_that_was_not_cancelled_is_noticed(self):
        import checks

        def ask(call, rows, **_):
            good = answers(*(row["output_ids"] for row in rows))
            return good if call == "greedy" else {"cancelled": {"finish": "length", "tokens": 2000}, "answers": good}

        assert checks.check_together(ask, REFERENCE)["wrong"] == [
            "the cancelled request ended with length after 2000 tokens"
        ]

    @pytest.mark.parametrize(
        ("passes", "wrong"),
        [
            ([[1, 0], [0, 1]] * len(REFERENCE), []),
            ([[1, 0]] * 2 * len(REFERENCE), ["no expert moved"]),
            ([[1, 0], [1, 1]] * len(REFERENCE), ["passes differ in the number of experts on the GPU"]),
            ([[1, 0], [0, 1]], [f"2 passes of at least {2 * len(REFERENCE)} are recorded"]),
            (None, ["0 files gpu_expert_distribution"]),
        ],
        ids=["right", "still", "more", "few", "none"],
    )
    def test_what_is_wrong_with_a_record_is_said(self, passes, wrong, tmp_path):
        import checks
        import torch

        def ask(call, what=None, rows=()):
            if call == "record_experts":
                if what == "dump":
                    torch.save({}, tmp_path / "expert_distribution_recorder_1.pt")
                    if passes:
                        masks = torch.tensor(passes, dtype=torch.bool)[:, None]
                        torch.save({"gpu_expert_masks": masks}, tmp_path / "gpu_expert_distribution_1.pt")
                return None
            if call == "greedy":
                return answers(*(row["output_ids"] for row in rows))
            return [row["logprobs"] for row in rows]

        found = checks.check_recorded(ask, REFERENCE, tmp_path, "BF16")
        assert (found["ok"], found["wrong"]) == (not wrong, wrong)


def test_an_engine_that_lost_its_port_is_known_by_its_log(tmp_path):
    from run import lost_its_port

    log = tmp_path / "log"
    assert not lost_its_port(log)
    log.write_text("listen on any local network address. port: 33289, code: -98, name: EADDRINUSE\nReceived sigquit\n")
    assert lost_its_port(log)
    log.write_text("out of memory\nReceived sigquit\n")
    assert not lost_its_port(log)


def test_the_int4_model_is_what_its_reference_computes():
    import int4_model
    import torch

    parts, values = int4_model.quantise(torch.randn(6, 64, generator=torch.Generator().manual_seed(0)))
    codes = (parts["_packed"].long()[..., None] >> (4 * torch.arange(8))) % 16 - 8
    scales = parts["_scale"].float().repeat_interleave(int4_model.GROUP, 1)
    assert torch.equal(codes.reshape(6, 64) * scales, values)
    assert parts["_shape"].tolist() == [6, 64]


def test_the_idle_share_is_what_nothing_covers():
    from side import idle_share

    # The first fifth is left out: 20..100 with 20..40 (two overlap), 60..80 covered.
    assert idle_share([(0, 30), (20, 40), (60, 80), (99, 100)]) == pytest.approx(1 - 41 / 80)
    with pytest.raises(RuntimeError, match="no work"):
        idle_share([])


def test_command_lines():
    from server import command_line

    given = {"kt_method": "BF16", "cuda_graph_bs_decode": [1, 2], "trust_remote_code": True, "off": False, "none": None}
    expected = "--kt-method BF16 --cuda-graph-bs-decode 1 2 --trust-remote-code"
    assert command_line(given) == expected.split()


class TestRows:
    def test_names_are_unique_and_baselines_exist(self):
        import rows

        names = [row.name for row in rows.ROWS]
        assert len(set(names)) == len(names)
        assert {row.baseline for row in rows.ROWS if row.baseline} <= set(names)

    def test_options(self):
        import rows

        by_name = {row.name: row.engine_options("M", "W", "cuda") for row in rows.ROWS}
        assert "kt_weight_path" not in by_name["plain"]
        assert by_name["graphs"]["kt_weight_path"] == "W"
        assert by_name["no expert on the GPU"]["kt_num_gpu_experts"] == 0
        assert "disable_prefill_cuda_graph" not in by_name["prefill graphs"]

    def test_rows_without_a_place_are_skipped_and_what_fails_is_told(self, tmp_path, monkeypatch):
        import run

        (tmp_path / "tiny").mkdir()
        (tmp_path / "tiny/model.safetensors.index.json").write_text("{}")
        (tmp_path / "places.json").write_text(json.dumps({"stock": {"python": "/nowhere/python"}}))
        words = ["run.py", "--out", str(tmp_path / "out.json"), "--places", str(tmp_path / "places.json")]
        monkeypatch.setattr(sys, "argv", [*words, "--work", str(tmp_path), "--rows", "graphs", "fork"])
        assert run.main() == 1
        found = json.loads((tmp_path / "out.json").read_text())["rows"]
        assert found["fork"] | {"status": "skipped", "reason": "no place is named fork"} == found["fork"]
        assert found["graphs"]["status"] == "failed"
        assert "/nowhere/python" in found["graphs"]["reason"]


def test_bandwidth_is_a_number():
    ran = subprocess.run([sys.executable, HARNESS / "bandwidth.py", "1"], capture_output=True, text=True, check=True)
    assert 0.5 < float(ran.stdout) < 5000


def test_figures_go_on_where_the_bandwidth_cannot_be_read(tmp_path, capsys):
    import rows
    import run
    from engines import Place

    given = argparse.Namespace(seconds=60, work=tmp_path, logs=tmp_path, out=tmp_path / "out.json")
    run.Run(given, {"stock": Place("/nowhere/python")})._read_bandwidth(rows.PREFILL)
    written = json.loads(given.out.read_text())
    assert written["read_gbps"] == {}
    assert "read bandwidth before prefill tokens 2048" in written["notes"][0]
    assert "/nowhere/python" in written["notes"][0]


class TestProcesses:
    def start(self, tmp_path, code: str):
        from engines import Place, Process

        return Process(Place(), ["-c", code], tmp_path / "log", {})

    def test_children_belong_to_it(self, tmp_path):
        process = self.start(tmp_path, "import subprocess; subprocess.run(['sleep', '60'])")
        end = time.monotonic() + 20
        while len(process.members()) < 2 and time.monotonic() < end:
            time.sleep(0.02)
        assert len(process.members()) == 2
        os.kill(process.popen.pid, 9)
        assert len(process.wait_for_end(0.3)) == 1  # the child outlives it, and is seen
        process.kill()
        assert process.wait_for_end(5) == []

    def test_an_engine_that_ends_is_an_error_with_its_last_words(self, tmp_path, monkeypatch):
        import engines

        (tmp_path / "side.py").write_text("import sys; sys.exit('no such model')")
        monkeypatch.setattr(engines, "SIDE", tmp_path / "side.py")
        engine = engines.Engine(engines.Place(), {}, tmp_path / "log")
        with pytest.raises(engines.EngineError, match="has ended: no such model"):
            engine.wait_until_up(20)
        engine.kill()

    def test_a_call_has_a_limit(self, tmp_path, monkeypatch):
        import engines

        (tmp_path / "side.py").write_text("import time; time.sleep(60)")
        monkeypatch.setattr(engines, "SIDE", tmp_path / "side.py")
        engine = engines.Engine(engines.Place(), {}, tmp_path / "log")
        with pytest.raises(engines.EngineError, match="no answer within 0 s"):
            engine.wait_until_up(0.1)
        engine.kill()

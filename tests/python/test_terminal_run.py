"""`kt run` under a pseudo-terminal: the question for a model, a served model and a chat with it, Ctrl-C."""

import re

import pytest
from terminal import CTRL_C, CTRL_D, terminal


def test_the_question_which_model(tmp_path):
    """Asked only for what is missing; an answer that is no model, and none at all."""
    with terminal(tmp_path, "run", "--port", "0") as shown:
        shown.wait_for("Which model?")
        assert "1  demo" in shown.text
        shown.type("nonsense")
        assert shown.exit_code() == 1
        assert "no model is called 'nonsense'" in shown.text.replace("\n", "")
    with terminal(tmp_path, "run", "--port", "0") as shown:
        shown.wait_for("Which model?")
        shown.type("", CTRL_C)
        assert shown.exit_code() == 130
        assert "Traceback" not in shown.text


@pytest.mark.timeout(240)
def test_a_model_is_run_and_talked_to(tmp_path, demo_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kt-kernel").symlink_to(demo_path.parents[1])
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with terminal(tmp_path, "run", "--port", "0", "--no-plan", "--context", "512", **cache) as server:
        server.wait_for("Which model?")
        server.type("1")
        server.wait_for("/v1/chat/completions", 120)  # the last of what it says when it is up
        port = re.search(r"http://127\.0\.0\.1:(\d+)/v1", server.text)[1]
        with terminal(tmp_path, "chat", "--port", port, "--max-tokens", "4", "-t", "0") as chat:
            chat.wait_for("demo at http://127.0.0.1")
            chat.type("What is the capital of France?")
            chat.wait_for("· Out 4", 60)
            chat.wait_for("cut off; --max-tokens is 4")
            chat.type("", CTRL_D)
            assert chat.exit_code() == 0
        server.type("", CTRL_C)
        assert server.exit_code(60) == 0
        assert "Traceback" not in server.text

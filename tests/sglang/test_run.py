"""`kt run --engine sglang` starts stock SGLang with the options it chose; what it does not know goes through."""

import json
import os
import re
import time
from pathlib import Path

import checks
import pytest
import server as http
from run import plugin_variables
from test_commands import ON_CPU, OWN, START_SECONDS, CommandServer

CHOSEN = f"--engine sglang --gpu-experts {OWN} --cpu-threads 2 --max-total-tokens 4096 --chunked-prefill-size 512"

# SGLang is chosen where there is a GPU.
NVIDIA_SMI = "#!/bin/sh\necho '0, GPU-0, NVIDIA H200, 143771, 143000, 9.0, 580.1'\n"


REACHED = re.compile(r"^kt run: reached: [\d.]+ tokens/s of one answer, \d+ % of what was promised$", re.MULTILINE)


def reached(log: Path) -> bool:
    """Somebody asks for it when the server is up, and tells."""
    end = time.monotonic() + 60
    while not (found := REACHED.search(log.read_text())) and time.monotonic() < end:
        time.sleep(0.5)
    return found is not None


@pytest.mark.timeout(900)
def test_kt_run_starts_sglang(place, tiny, reference, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    kt = ["-c", "from kt_kernel.cli.main import main; main()", "run", str(tiny), "--served-model-name", "small"]
    words = [*kt, *CHOSEN.split(), *ON_CPU.split(), "--dtype", "bfloat16"]
    log = tmp_path / "log"
    variables = plugin_variables(place, "cpu") | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    server = CommandServer(place, words, log, **variables)
    try:
        server.wait_until_up(START_SECONDS)
        answers = [server.generate(row) for row in reference]
        assert checks.wrong_tokens(reference, answers) == []
        assert "small" in json.dumps(server.models())
        assert "kt run: engine: sglang" in log.read_text()
        assert reached(log)
        assert http.check_end(server, "SIGINT")["wrong"] == []
    finally:
        server.kill()

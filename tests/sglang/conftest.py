"""Stock SGLang as released, on the CPU, with this kt_kernel. `make test-sglang` installs it into .venv-sglang."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HARNESS = ROOT / "bench/sglang"
PYTHON = ROOT / ".venv-sglang/bin/python"
sys.path.insert(0, str(HARNESS))

from engines import Place  # noqa: E402
from run import plugin_variables  # noqa: E402


@pytest.fixture(scope="session")
def place() -> Place:
    """KT_TEST_SGLANG_PYTHON names another environment."""
    python = Path(os.environ.get("KT_TEST_SGLANG_PYTHON", PYTHON))
    if not python.exists():
        pytest.skip(f"{python} is not there ('make test-sglang' makes it): no SGLang was run")
    return Place(python=str(python))


@pytest.fixture(scope="session")
def tiny(place, tmp_path_factory) -> Path:
    """The tiny model and its reference."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    for what in ("tiny", "reference"):
        variables = place.environment(**plugin_variables(place, "cpu"))
        subprocess.run([place.python, HARNESS / "models.py", folder, what], env=variables, check=True)
    return folder


@pytest.fixture(scope="session")
def reference(tiny) -> list[dict]:
    return json.loads((tiny / "reference.json").read_text())

"""What pyproject.toml, constraints.txt, the Makefile and the workflows name fits together."""

import re
import stat
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()
NEEDED = {"engine", "convert", "sglang", "dev"}
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def extras() -> dict[str, list[str]]:
    """Name -> requirements. Python 3.10 has no reader of TOML."""
    section = PROJECT.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    lists = re.findall(r"^([\w-]+) = \[(.*?)\]$", re.sub(r"^#.*\n", "", section, flags=re.MULTILINE), re.M | re.S)
    return {name: re.findall(r'"([^"]+)"', text) for name, text in lists}


def named_in(text: str) -> set[str]:
    """Extras that a text tells users to install."""
    lists = re.findall(r"(?:kt-kernel|pip install '\.|\"\.)\[([\w, -]+)\]", text)
    return {name.strip() for found in lists for name in found.split(",")}


def test_the_extras_that_users_know_are_there():
    assert extras().keys() >= NEEDED
    assert all(extras().values())


def test_texts_name_only_extras_that_exist():
    files = [*ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "pyproject.toml", *(ROOT / "docs").glob("*.md")]
    files += [*(ROOT / "src").rglob("*.py"), *(ROOT / "tools").iterdir(), *(ROOT / "scripts").iterdir()]
    named = {name: file.name for file in files if file.is_file() for name in named_in(file.read_text())}
    assert named.keys() >= NEEDED
    assert {name: file for name, file in named.items() if name not in extras()} == {}


def test_a_name_that_does_not_exist_is_noticed():
    assert named_in("pip install 'kt-kernel[engin, plot]', or pip install '.[dve]'") == {"engin", "plot", "dve"}


def test_install_md_has_every_extra_for_users():
    rows = re.findall(r"^\| `kt-kernel\[([\w-]+)\]`", (ROOT / "docs/install.md").read_text(), re.MULTILINE)
    assert set(rows) == extras().keys() - {"test", "lint"}  # parts of dev


def test_what_the_tests_run_with_is_pinned():
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    lists = re.findall(r"^(?:requires|dependencies) = \[(.*)\]$", PROJECT, re.MULTILINE)
    assert len(lists) == 2
    needed = [*extras()["engine"], *extras()["plot"], *extras()["test"], *extras()["lint"]]
    needed += [name for text in lists for name in re.findall(r'"([^"]+)"', text)]
    assert {re.match(r"[\w-]+", requirement)[0] for requirement in needed} - {"kt-kernel"} <= pinned


def steps(workflow: Path) -> list[dict]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_what_exists(workflow):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = "\n".join(step["run"] for step in steps(workflow) if "run" in step)
    assert commands
    assert set(re.findall(r"\bmake ([a-z-]+)", commands)) <= targets
    for name in re.findall(r"(?:^|\s)((?:\./|\.ci/|tools/)[\w./-]+)", commands):
        script = ROOT / name
        assert script.is_file(), name
        assert script.suffix == ".py" or script.stat().st_mode & stat.S_IXUSR, name
    assert all("uses" in step or "run" in step for step in steps(workflow))


def test_ci_runs_what_make_test_runs():
    assert "make test" in (ROOT / ".ci/run").read_text()
    assert (ROOT / ".ci/run").stat().st_mode & stat.S_IXUSR
    assert any(step.get("run") == ".ci/run" for step in steps(ROOT / ".github/workflows/ci.yml"))

"""The repository keeps to its own map and rules."""

import re
from pathlib import Path

import pytest
from long_files import LONG_FILES

ROOT = Path(__file__).parents[2]

# "Dependencies point down only": a folder may include itself and what is on lower lines.
LAYERS = [
    ["bindings"],
    ["runtime", "decoder"],
    ["dense"],
    ["moe", "cuda"],
    ["kernels", "threads"],
    ["formats", "cpu"],
    ["base", "portable"],
]
RANK = {folder: -line for line, folders in enumerate(LAYERS) for folder in folders}


def allowed(source: str, target: str) -> bool:
    return source == target or RANK[target] < RANK[source]


def missing_folders(text: str) -> list[str]:
    """Folders of the map's rows that do not exist; the second column may name folders inside those of the first."""
    missing = []
    for row in re.findall(r"^\| (`.*?) \| (.*) \|$", text, re.MULTILINE):
        folders, nested = (re.findall(r"`([\w/]+/)`", column) for column in row)
        missing += [folder for folder in folders if not (ROOT / folder).is_dir()]
        missing += [name for name in nested if not any((ROOT / folder / name).is_dir() for folder in ["", *folders])]
    return missing


def test_every_folder_of_the_map_exists():
    assert missing_folders((ROOT / "ARCHITECTURE.md").read_text()) == []


def test_a_folder_that_is_missing_is_found():
    assert missing_folders("| `cpp/`, `nowhere/` | holds `base/` and `absent/` |") == ["nowhere/", "absent/"]


def test_every_core_folder_has_a_layer():
    assert {path.name for path in (ROOT / "cpp").iterdir() if path.is_dir()} <= RANK.keys()


@pytest.mark.parametrize("folder", RANK)
def test_includes_point_downwards(folder):
    upwards = []
    for path in (ROOT / "cpp" / folder).rglob("*"):
        if path.suffix not in {".h", ".cc", ".inc"}:
            continue
        for target in re.findall(r'^\s*#\s*include "(\w+)/', path.read_text(), re.MULTILINE):
            if target in RANK and not allowed(folder, target):
                upwards.append(f"{path.relative_to(ROOT)} includes {target}/")
    assert upwards == []


def test_the_include_rule_can_fail():
    assert allowed("moe", "kernels")
    assert not allowed("kernels", "moe")
    assert not allowed("threads", "kernels")


def test_only_the_bindings_know_python():
    guilty = [
        str(path.relative_to(ROOT))
        for folder in RANK.keys() - {"bindings"}
        for path in (ROOT / "cpp" / folder).rglob("*.*")
        if re.search(r'^\s*#\s*include [<"](?:nanobind|Python\.h)', path.read_text(), re.MULTILINE)
    ]
    assert guilty == []


def test_features_of_the_table_are_known_to_the_core():
    table = set(re.findall(r"^set\(KT_FLAG_(\w+)", (ROOT / "cmake/isa.cmake").read_text(), re.MULTILINE))
    core = set(re.findall(r"^\s+X\((\w+), leaf", (ROOT / "cpp/cpu/features.h").read_text(), re.MULTILINE))
    assert table == core


def test_files_that_begin_exist():
    assert [name for name in LONG_FILES if not (ROOT / "tests/python" / name).exists()] == []

"""The repository keeps to its own map and rules."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# "Dependencies point down only": a folder may include itself and what is on lower lines.
LAYERS = [["bindings"], ["runtime", "moe"], ["kernels", "threads"], ["formats", "cpu"], ["base"]]
RANK = {folder: -line for line, folders in enumerate(LAYERS) for folder in folders}


def allowed(source: str, target: str) -> bool:
    return source == target or RANK[target] < RANK[source]


def test_every_folder_of_the_map_exists():
    folders = re.findall(r"`([\w/]+/)`", (ROOT / "ARCHITECTURE.md").read_text())
    assert "cpp/base/" in folders
    # `cli/` and `isa/` are named in the row of the folder that holds them.
    nested = {"cli/": "src/kt_kernel/cli/", "isa/": "cpp/kernels/isa/"}
    assert [folder for folder in folders if not (ROOT / nested.get(folder, folder)).is_dir()] == []


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
        if re.search(r"nanobind|Python\.h", path.read_text())
    ]
    assert guilty == []


def test_features_of_the_table_are_known_to_the_core():
    table = set(re.findall(r"^set\(KT_FLAG_(\w+)", (ROOT / "cmake/isa.cmake").read_text(), re.MULTILINE))
    core = set(re.findall(r"^\s+X\((\w+), leaf", (ROOT / "cpp/cpu/features.h").read_text(), re.MULTILINE))
    assert table == core

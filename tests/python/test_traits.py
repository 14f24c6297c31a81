"""Every operation of the vector and tile traits has a line in tests/cpp/trait_checks.cc."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The row only chooses among the others; emulated traits are what the checks compare with.
NATIVE = [path for path in (ROOT / "cpp/kernels/isa").glob("*.h") if not re.match(r"emu|row", path.name)]


def operations(text: str) -> set[str]:
    return set(re.findall(r"^\s+static (?!constexpr)[\w:*& ]+? (\w+)\(", text, re.MULTILINE))


@pytest.mark.parametrize("path", NATIVE, ids=lambda path: path.stem)
def test_every_operation_is_checked(path):
    checks = (ROOT / "tests/cpp/trait_checks.cc").read_text()
    found = operations(path.read_text())
    assert len(found) >= 5
    assert {name for name in found if not re.search(rf"\b{name}\b", checks)} == set()

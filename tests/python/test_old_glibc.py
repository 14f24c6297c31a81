"""The extension asks for symbol versions that every distribution since 2018 has (manylinux_2_28)."""

import re
from pathlib import Path

import pytest

import kt_kernel

NEWEST = {b"GLIBC": (2, 28), b"GLIBCXX": (3, 4, 24), b"CXXABI": (1, 3, 11)}


@pytest.mark.parametrize("library", sorted(Path(kt_kernel.__file__).parent.glob("*.so")), ids=lambda path: path.name)
@pytest.mark.parametrize("family", NEWEST, ids=bytes.decode)
def test_no_newer_symbol_version(library, family):
    found = re.findall(rb"\0" + family + rb"_(\d+(?:\.\d+)+)(?=\0)", library.read_bytes())
    versions = {tuple(map(int, version.split(b"."))) for version in found}
    assert versions, "every library needs some version"
    assert max(versions) <= NEWEST[family]

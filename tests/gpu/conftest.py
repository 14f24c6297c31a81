"""Tests that need a GPU; elsewhere they are skipped, saying so."""

import pytest

torch = pytest.importorskip("torch")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no GPU: torch.cuda.is_available() is False")
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(skip)

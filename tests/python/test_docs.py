"""Pages: those that are written from the code are not stale, links lead somewhere, every page is in the index."""

import re
import subprocess
import sys

import pytest
from doc_blocks import PAGES, ROOT


def test_what_runs_where_is_not_stale():
    pytest.importorskip("transformers", reason="transformers is not installed: docs/support.md was not compared")
    command = [sys.executable, ROOT / "tools/support_page.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\((?!https?://)([^)#]+)", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    assert missing == []


def test_every_page_is_in_the_index_and_in_the_site():
    index, site = ((ROOT / name).read_text() for name in ("docs/index.md", "mkdocs.yml"))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert sorted(pages) == sorted(re.findall(r"\]\((\w+\.md)\)", index))
    assert pages | {"index.md"} == set(re.findall(r"^  - (\w+\.md)$", site, re.MULTILINE))

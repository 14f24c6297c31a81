"""Writes what runs where, out of the tables in the code: docs/support.md, and the block of README.md.

python tools/support_page.py            writes both
python tools/support_page.py --check    changes nothing; fails where they are stale
"""

import re
import sys
from pathlib import Path

from kt_kernel import _core, methods
from kt_kernel.convert.engine import QUANT_METHODS
from kt_kernel.engine.native import FAMILIES
from kt_kernel.ggml_types import EXPERT_TYPES

_ROOT = Path(__file__).parents[1]
_PAGE = _ROOT / "docs/support.md"
_README = _ROOT / "README.md"
_BEGIN, _END = "<!-- tools/support_page.py writes this -->\n", "<!-- end -->\n"
_YES, _NO = "yes", "-"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _table(head: list[str], rows: list[list[str]]) -> str:
    return _row(head) + "|" + "---|" * len(head) + "\n" + "".join(map(_row, rows))


def methods_table() -> str:
    """Every format of `_core.formats()` is built for every row of cmake/isa.cmake."""
    sets = [variant.name for variant in reversed(_core.variants()) if not variant.emulated]
    written = set(QUANT_METHODS.values())
    rows = []
    for method in methods.NAMES:
        formats = methods.formats_of(method) if method in methods.METHODS else tuple(map(str.lower, _gguf_names()))
        built = set(formats) <= set(_core.formats())
        on_gpu = method in methods.METHODS and _core.has_slices(formats[0])
        shown = f"{len(formats)} types" if method == methods.LLAMAFILE else ", ".join(formats)
        cells = [f"`{method}`", shown, *(_YES if built else _NO for _ in sets)]
        rows.append([*cells, _YES, _YES, _YES if on_gpu else _NO, _YES if method in written else _NO])
    head = ["Method", "Format", *(f"`{name}`" for name in sets)]
    return _table(
        [*head, "`kt run`, transformers", "SGLang", "its long prompts on the GPU", "`kt quant` writes it"], rows
    )


def _gguf_names() -> list[str]:
    return [kind.name for kind in EXPERT_TYPES.values()]


def families_table() -> str:
    """Architectures of transformers that were tried, by the table in docs/transformers.md, which its test writes."""
    tried = re.findall(r"^\| (\w+) \| \w+ \| (\w+) \|", (_ROOT / "docs/transformers.md").read_text(), re.MULTILINE)
    rows = [
        [family, _NO if by == "transformers" else _YES, _YES if family in FAMILIES else _NO] for family, by in tried
    ]
    return _table(["model_type", "experts on these kernels", "decoded by the native decoder"], rows)


def page() -> str:
    families = families_table()
    dense = sorted(set(FAMILIES) - set(re.findall(r"^\| (\w+) \|", families, re.MULTILINE)))
    return f"""# What runs where

`tools/support_page.py` wrote this page out of the tables in the code.

## Methods, instruction sets, engines

{methods_table()}
The types of LLAMAFILE are {", ".join(_gguf_names())}, in any mixture. Where long prompts are not computed
on the GPU, SGLang computes them as it does short ones.

## Families

Tried with tiny models of transformers, logits against its own; [transformers.md](transformers.md) has how. Dense
families of the native decoder: {", ".join(dense)}.

{families}
Models that `kt` knows by name are in [cli.md](cli.md).
"""


def readme() -> str:
    text = _README.read_text()
    begin = text.index(_BEGIN) + len(_BEGIN)
    return text[:begin] + "\n" + methods_table() + "\n" + text[text.index(_END, begin) :]


def main() -> None:
    stale = [
        path for path, text in ((_PAGE, page()), (_README, readme())) if not path.exists() or path.read_text() != text
    ]
    if "--check" in sys.argv[1:]:
        if stale:
            names = ", ".join(str(path.relative_to(_ROOT)) for path in stale)
            sys.exit(f"{names}: stale; python tools/support_page.py writes it")
        return
    _README.write_text(readme())
    _PAGE.write_text(page())


if __name__ == "__main__":
    main()

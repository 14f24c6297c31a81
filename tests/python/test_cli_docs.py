"""docs/cli.md: every command, setting, variable and known model, as the code has them.

pytest --update-docs writes it.
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_readme import ROOT

from kt_kernel import env, settings
from kt_kernel.cli.main import command
from kt_kernel.plan.sizes import checkpoint_bytes
from kt_kernel.registry.known import KNOWN
from kt_kernel.settings import SETTINGS

PAGE = ROOT / "docs/cli.md"
PART = re.compile(r"(<!-- pytest --update-docs writes (\w+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def table(columns: list[str], rows: list[list[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(map(cell, line))} |\n" for line in lines)


def commands(found, path: str) -> Iterator[tuple[str, object]]:
    yield path, found
    for name, child in getattr(found, "commands", {}).items():
        yield from commands(child, f"{path} {name}")


def options(found) -> list[list[object]]:
    rows = []
    for parameter in found.params:
        if parameter.param_type_name == "argument":
            names = f"`{parameter.name.upper()}`"
        else:
            names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
        given = parameter.default
        if isinstance(given, list):
            given = " ".join(given)
        plain = given is None or given is False or given in ((), [], "") or callable(given)
        rows.append([names, parameter.help or "", "" if plain else f"`{given}`"])
    return rows


def examples(epilog: str | None) -> str:
    lines = (epilog or "").split("\n")[2:]
    return "\n```bash\n" + "".join(f"{line.strip()}\n" for line in lines) + "```\n" if lines else ""


def short(path: str, below: dict) -> str:
    rows = [[f"`{path} {name}`", found.short_help] for name, found in below.items()]
    return table(["Command", "What it does"], rows)


def reference() -> str:
    group = command()
    text = short("kt", group.commands)
    for path, found in list(commands(group, "kt"))[1:]:
        paragraphs = "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", found.help))
        text += f"\n### {path}\n\n{paragraphs}\n"
        if rows := options(found):
            text += "\n" + table(["Option", "Meaning", "Default"], rows)
        if below := getattr(found, "commands", None):
            text += "\n" + table(
                ["Command", "What it does"], [[f"`{path} {n}`", c.short_help] for n, c in below.items()]
            )
        text += examples(found.epilog)
    return text


def settings_table() -> str:
    rows = []
    for name, setting in SETTINGS.items():
        default = settings.as_text(setting.default)
        rows.append([f"`{name}`", setting.about, f"`{default}`" if setting.default not in ("", [], {}) else ""])
    return table(["Setting", "Meaning", "Default"], rows)


def variables_table() -> str:
    functions = [found for name, found in vars(env).items() if inspect.isfunction(found) and not name.startswith("_")]
    told = [" ".join(found.__doc__.split()).partition(": ") for found in functions]
    rows = [
        [re.sub(r"\b[A-Z_]{3,}\b|no_proxy", r"`\g<0>`", names), text[0].upper() + text[1:].replace("``", "`")]
        for names, _, text in told
    ]
    return table(["Variable", "Meaning"], rows)


def models_table() -> str:
    rows = []
    for model in KNOWN:
        size = f"{checkpoint_bytes(model.facts) / 1e9:.0f}" if model.facts else ""
        experts = f"{model.facts.experts}, {model.facts.top_k} at a time" if model.facts else ""
        aliases = ", ".join(f"`{name}`" for name in model.aliases)
        rows.append([f"`{model.name}`", aliases, model.repo, experts, model.method or "", size])
    return table(["Name", "Aliases", "Hub", "Experts", "Method", "GB"], rows)


WRITERS = {"commands": reference, "settings": settings_table, "variables": variables_table, "models": models_table}


def test_the_page_is_what_the_code_says(pytestconfig):
    page = PAGE.read_text()
    assert [name for _, name in PART.findall(page)] == list(WRITERS)
    new = PART.sub(lambda part: f"{part[1]}\n{WRITERS[part[2]]()}\n", page)
    if pytestconfig.getoption("update_docs"):
        PAGE.write_text(new)
    elif page != new:
        pytest.fail(f"{PAGE.name} is stale: run pytest {Path(__file__).name} --update-docs")

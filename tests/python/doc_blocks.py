"""The code blocks of a page, the commands in them, and what a test does with each command."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), ROOT / "bench/README.md", *(ROOT / "docs").glob("*.md")])


class Block(NamedTuple):
    page: str
    line: int
    language: str
    text: str


class Rule(NamedTuple):
    """What stands for a command: `run` is expanded from the match, and None is not run at all. `why` is empty only
    where the command is run as the page has it.
    """

    pattern: str
    run: str | None
    why: str = ""


AS_IT_IS = r"\g<0>"
SMALL = "--shape 8,2,256,128 --formats int4 --tokens 1 --seconds 0.02 --threads 1"

# The first that matches counts; a command that none of them matches fails.
RULES = (
    Rule(r"make ([\w-]+)", r"make --silent --dry-run --directory={root} \1", "it builds for minutes"),
    Rule(r"pip install .*", None, "it changes this environment; 'make test-wheel' installs into an empty one"),
    Rule(r"CPUINFER_\w+=\w+ \./install\.sh .*", None, "it compiles for minutes; test_install_script.py has its calls"),
    Rule(r"python -m sglang\.launch_server .*", None, "it needs SGLang; 'make test-sglang' starts such servers"),
    Rule(r"python (scripts/convert_gpu_weights\.py) .*", r"python {root}/\1 --help", "it needs llmcompressor"),
    Rule(r"\$EDITOR .*", r"EDITOR=cat; \g<0>", "it waits for a person"),
    Rule(r"kt run (?!.*--dry-run).*", r"\g<0> --dry-run", "it serves until it is stopped"),
    Rule(r"kt verify (demo|/).*", r"kt verify --help", "it takes half a minute; test_verify_model.py does it"),
    Rule(r"kt verify", r"\g<0> --quick --formats int4g", "all formats take half a minute"),
    Rule(r"kt verify --quick", r"\g<0> --formats int8", "all formats take seconds"),
    Rule(r"kt bench hybrid .*", r"kt bench hybrid --help", "it needs a GPU"),
    Rule(r"kt bench peers .*", r"kt bench peers --help", "it downloads kt-kernel 0.7.2"),
    Rule(r"kt bench (serve|quality) .*", r"kt bench \1 --help", "it takes minutes; test_bench_*.py do parts of it"),
    Rule(r"kt bench limits.*", r"\g<0> --seconds 0.02", "it takes a second for each point"),
    Rule(r"kt bench kernels.*|kt bench", rf"\g<0> {SMALL}", "it takes seconds for each point"),
    Rule(r"kt .*", AS_IT_IS),
    Rule(r"(curl|git diff|echo) .*", AS_IT_IS),
)

# Blocks of text, by page and first line: what commands printed, and why a test does not run these.
OUTPUTS = {
    ("install.md", "== what is here"): "tools/fresh_install.sh takes 20 minutes",
    ("sglang.md", "$ kt run tiny --gpu-experts 4 --attention-backend triton"): "it needs SGLang and a GPU",
}


def blocks_of(page: Path) -> list[Block]:
    """In their order. A fence that does not end is an error."""
    text = page.read_text()
    fences = list(re.finditer(r"^[ ]*```(.*)$", text, re.MULTILINE))
    assert len(fences) % 2 == 0, f"{page.name}: a block does not end"
    return [
        Block(page.name, text.count("\n", 0, begin.start()) + 1, begin[1], text[begin.end() + 1 : end.start()])
        for begin, end in zip(fences[::2], fences[1::2], strict=True)
    ]


def commands_of(text: str) -> list[str]:
    """Of a block for a shell: a line that ends in a backslash goes on, && parts two, and comments are left out."""
    lines = [re.sub(r"\s+#\s.*", "", line).strip() for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines()]
    return [command for line in lines if line for command in line.split(" && ")]


def rule_of(command: str) -> Rule:
    found = next((rule for rule in RULES if re.fullmatch(rule.pattern, command)), None)
    assert found, f"no rule of doc_blocks.py says what a test does with '{command}'"
    return found


def stand_in(command: str) -> str | None:
    """What is run for it."""
    rule = rule_of(command)
    return rule.run and re.fullmatch(rule.pattern, command).expand(rule.run).replace("{root}", shlex.quote(str(ROOT)))

"""Every code block of every page is run, parsed, or listed with the reason why not.

Python blocks of a page share a namespace. Commands run in their order in a folder where what they name exists: models,
a server, a hub. RULES of doc_blocks.py is the table of what is run in another way, or not at all.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer
from cli_cases import run
from convert_cases import SHAPE, write_model
from doc_blocks import OUTPUTS, PAGES, ROOT, RULES, Block, blocks_of, commands_of, rule_of, stand_in
from fake_hub import FakeHub
from gguf_cases import Experts, write_gguf
from odd_server import delta, odd_server, send, stream
from plan_cases import FakeProbe, machine
from test_readme import run_blocks

import kt_kernel
from kt_kernel import folders, settings
from kt_kernel.cli import main
from kt_kernel.demo import source
from kt_kernel.machine import facts
from kt_kernel.machine import probe as probes
from kt_kernel.plan import plan

GGUF_FIELDS = {
    "qwen3moe.expert_count": SHAPE.experts,
    "qwen3moe.expert_used_count": SHAPE.top_k,
    "qwen3moe.block_count": 5,
}
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
WORDS = ["<unk>", "The", "capital", "of", "France", "is", *(f"w{index}" for index in range(58))]
SHELL = re.compile(r"[|<>$*]|^\w+=|^(?!kt\b)|^kt chat\b")  # what takes more than our own `main`
SHIM = '#!/bin/sh\nexec {python} {arguments} "$@"\n'
DONE: set[str] = set()  # what another page had already, such as `kt doctor`, which takes 2 s
MAIN = "from kt_kernel.cli.main import main; main()"


def of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


def pages_with(language: str) -> list[str]:
    return list(dict.fromkeys(block.page for block in of(language)))


def test_no_block_is_passed_over():
    assert {block.language for block in BLOCKS} == {"python", "bash", "json", "text"}
    assert {(block.page, block.text.splitlines()[0]) for block in of("text")} == OUTPUTS.keys()
    for block in of("bash"):
        assert commands_of(block.text), block
        for command in commands_of(block.text):
            rule_of(command)


def test_a_command_without_a_rule_is_noticed():
    with pytest.raises(AssertionError, match="no rule"):
        rule_of("sudo rm -rf build")


def test_every_rule_is_used():
    commands = [command for block in of("bash") for command in commands_of(block.text)]
    assert [rule for rule in RULES if not any(rule_of(command) is rule for command in commands)] == []


@pytest.mark.parametrize("block", of("json"), ids=lambda block: f"{block.page}:{block.line}")
def test_data(block):
    json.loads(block.text)


# Python


@pytest.mark.parametrize("page", pages_with("python"))
def test_python(page, tmp_path, capsys):
    setup, check = PYTHON[page]
    names = run_blocks(next(path for path in PAGES if path.name == page), {}, places=setup(tmp_path))
    check(names, capsys.readouterr().out.splitlines())


def nothing(_folder: Path) -> dict[str, Path]:
    return {}


def a_model_with_a_tokenizer(folder: Path) -> dict[str, Path]:
    pytest.importorskip("transformers", reason="transformers is not installed: docs/transformers.md was not run")
    from hf_checkpoints import save_toy
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = save_toy(folder / "toy")
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(model)
    return {"/path/to/model": model, "/path/to/store": folder / "store"}


def check_readme(names: dict, _said: list[str]) -> None:
    out = names["out"]
    assert out.isfinite().all()
    assert out.float().std() > 0.01


def check_install(names: dict, said: list[str]) -> None:
    package = names["kt_kernel"]
    assert said == [f"{package.__version__} {package.__cpu_variant__}"]


def check_transformers(names: dict, said: list[str]) -> None:
    assert said[0].startswith("The capital of France is ")
    assert said[-1] == "model.layers.1.mlp.experts files None"
    kept = names["model"].hf_quantizer.quantization_config
    assert kept.method == "AMXINT8"
    assert list(Path(kept.store).glob("*.ktpack"))


# page -> what its paths stand for, and what must come out
PYTHON = {
    "README.md": (nothing, check_readme),
    "install.md": (nothing, check_install),
    "transformers.md": (a_model_with_a_tokenizer, check_transformers),
}


# Commands


@pytest.fixture
def shared_cache() -> Path:
    """Where the demo model is, or will be."""
    return folders.cache_folder().resolve()


@pytest.fixture
def places(shared_cache, home, tmp_path, monkeypatch):
    """Makes what pages name: text on a page -> what stands for it."""
    folders.cache_folder().parent.mkdir()
    folders.cache_folder().symlink_to(shared_cache)
    data = tmp_path / "data"
    (data / "models").mkdir(parents=True)
    own = home / "models"
    for folder in (own / "Qwen3-30B-A3B", own / "GLM-4.5-Air", tmp_path / "model", tmp_path / "DeepSeek-V3"):
        write_model(folder)
    files = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    write_model(folders.data_folder() / "models/MiniMax-M2")
    write_gguf(tmp_path / "model.gguf", Experts(SHAPE).tensors(), fields=GGUF_FIELDS)
    make_changed_repository(tmp_path)
    put_on_path(tmp_path / "bin", monkeypatch)
    monkeypatch.chdir(tmp_path)
    for name in ("HF_ENDPOINT", "HF_TOKEN", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    repositories = ("Qwen/Qwen3-30B-A3B", "unsloth/Qwen3-30B-A3B-GGUF", "openai/gpt-oss-20b")
    gguf = {"model-Q4_K_M.gguf": (tmp_path / "model.gguf").read_bytes()}
    hub = FakeHub({name: gguf if name.endswith("GGUF") else files for name in repositories})
    with hub, odd_server(answer) as server:
        settings.set("download.mirror", hub.address)
        settings.set("server.port", str(server.port))
        yield {
            "/path/to/model": str(tmp_path / "model"),
            "/data": str(data),
            "192.168.1.5 -p 30000": f"127.0.0.1 -p {server.port}",
            "https://api.example": f"http://127.0.0.1:{server.port}",
            "127.0.0.1:8000": f"127.0.0.1:{server.port}",
            "--port 8000": f"--port {server.port}",
        }


def put_on_path(folder: Path, monkeypatch) -> None:
    """`kt` of these sources, and the Python that runs this."""
    folder.mkdir()
    for name, arguments in {"kt": f"-c {shlex.quote(MAIN)}", "python": ""}.items():
        (folder / name).write_text(SHIM.format(python=shlex.quote(sys.executable), arguments=arguments))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(kt_kernel.__file__).parents[1]))


def make_changed_repository(folder: Path) -> None:
    if not shutil.which("git"):
        pytest.skip("git is not here: the commands of pages were not run")
    (folder / "change").write_text("before")
    for command in ("init --quiet", "add change"):
        subprocess.run(["git", *command.split()], cwd=folder, check=True)
    (folder / "change").write_text("after")


def answer(to) -> None:
    """As a server does, whole or in pieces."""
    if to.server.asked[-1].get("stream"):
        stream(delta(content="An answer.", finish="stop"), "[DONE]")(to)
    else:
        message = {"role": "assistant", "content": "An answer."}
        send(to, 200, {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


def execute(command: str, capfd) -> None:
    """Without a terminal; stdin is a question. Lines that need no shell run in this process, 0.3 s sooner."""
    if SHELL.search(command):
        done = subprocess.run(["bash", "-c", command], input="Hello!", capture_output=True, text=True, timeout=120)
        code, said = done.returncode, done.stdout + done.stderr
    else:
        words = [os.path.expanduser(word) for word in shlex.split(command)[1:]]
        with made_up_machine() if words[0] in ("plan", "run") else nullcontext():
            found = run(capfd, *words)
        code, said = found.code, found.out + found.err
    fine = (0, 1) if command.startswith("kt doctor") else (0,)  # 1: something is wrong with this machine
    assert code in fine, f"{command}\n{said}"


@contextmanager
def made_up_machine():
    """Whether a model fits must not depend on where this runs, and a probe takes ten seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes, "Probe", lambda found, threads, **_: FakeProbe(threads))
        patch.setattr(facts, "machine", machine)
        patch.setattr(plan, "disk_of", lambda _folder: machine().disks[0])
        yield


def filled_in(command: str, places: dict[str, str]) -> str:
    for text, real in places.items():
        command = re.sub(re.escape(text) + r"(?![\w-])", lambda _, real=real: real, command)
    return command


def missing_for(command: str) -> str | None:
    """Programs and packages that a user installs besides, and that machines which run the tests may lack."""
    program = command.split()[0]
    if program in ("curl", "make") and not shutil.which(program):
        return program
    if re.search(r"\bdemo\b", command) and (source.installed_file() is None or find_spec("transformers") is None):
        return "what the demo model is made of"
    if command.startswith("kt model download") and find_spec("huggingface_hub") is None:
        return "huggingface_hub"
    return None


@pytest.mark.parametrize("page", pages_with("bash"))
def test_commands(page, places, capfd):
    absent = []
    for block in of("bash"):
        for command in commands_of(block.text) if block.page == page else ():
            if missing := missing_for(command):
                absent.append(f"{command} ({missing} is not here)")
            elif (runnable := stand_in(command)) and runnable not in DONE:
                execute(filled_in(runnable, places), capfd)
                DONE.add(runnable)
    if absent:
        pytest.skip(f"not run: {', '.join(absent)}; all other commands of {page} were")


def kt_command(words: list[str]):
    """The click command that a line means, and the words that are left."""
    command, rest = main.command(words[1] if len(words) > 1 else None), words[1:]
    while hasattr(command, "get_command") and rest and not rest[0].startswith("-"):
        found = command.get_command(typer.Context(command), rest[0])
        assert found is not None, f"{' '.join(words)}: there is no '{rest[0]}'"
        command, rest = found, rest[1:]
    return command, rest


def check_options(line: str) -> None:
    words = shlex.split(line)
    if words[0] == "kt":
        command, given = kt_command(words)
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    else:
        helped = subprocess.run([sys.executable, ROOT / words[1], "--help"], capture_output=True, text=True).stdout
        known, given = set(re.findall(r"--\w+", helped)), words
    unknown = [word for word in given if re.match(r"--?[a-zA-Z]", word) and word.partition("=")[0] not in known]
    assert unknown == [], f"{line}: no such options"


def only_helped() -> list[str]:
    commands = {command for block in of("bash") for command in commands_of(block.text)}
    return sorted(command for command in commands if (stand_in(command) or "").endswith(" --help"))


@pytest.mark.parametrize("command", only_helped())
def test_options_of_commands_that_only_help_is_asked_of(command):
    check_options(command)


def test_an_option_that_does_not_exist_is_noticed():
    script = "python scripts/convert_gpu_weights.py --model_idd x"
    for wrong in ("kt plan demo --fast-as-light", "kt modle list", "kt bench kernels --tokns 1", script):
        with pytest.raises(AssertionError):
            check_options(wrong)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.why], ids=lambda rule: rule.pattern)
def test_what_is_not_run_as_written(rule):
    """Skips only to be printed: what was run in its place, and why."""
    found = {
        f"{block.page}:{block.line}": None
        for block in of("bash")
        for command in commands_of(block.text)
        if rule_of(command) is rule
    }
    instead = f"run as {rule.run}" if rule.run else "not run"
    pytest.skip(f"'{rule.pattern}' of {', '.join(found)} was {instead}, since {rule.why}")

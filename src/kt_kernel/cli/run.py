"""``kt run``: chooses how to run a model, says why, and serves it."""

import logging
import shlex
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kt_kernel import env, settings
from kt_kernel.cli import options, printing
from kt_kernel.cli import run_options as of
from kt_kernel.cli.language import t
from kt_kernel.errors import UserError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from kt_kernel.launch.job import Asked, RunJob
    from kt_kernel.launch.sglang import Launch
    from kt_kernel.machine.facts import Machine
    from kt_kernel.plan.choices import Choice
    from kt_kernel.plan.plan import Plan
    from kt_kernel.registry.find import Found

_NEEDED = ("h11", "jinja2", "msgspec", "starlette", "transformers", "uvicorn")  # the extra; a test compares
_ENGINE_PYTHON = (3, 11)  # of transformers 5.21
# What a model or a setting that does not fit raises; anything else is a fault of ours and keeps its traceback.
_EXPECTED = (OSError, ValueError, RuntimeError, ImportError, MemoryError)

# Of open_engine's arguments, those that options have under another name.
_OPTIONS = {"weight_path": "--weights-path"}

# Options that are not kt's are passed on, as they are.
EXAMPLES = printing.examples("kt run demo", "kt run m2 --dry-run", "kt run qwen3-30b --context 16384 --port 8001")
CONTEXT_SETTINGS = {"ignore_unknown_options": True}


def run(
    context: typer.Context,
    arguments: of.Arguments = None,
    engine: of.Engine = None,
    host: of.Host = None,
    port: of.Port = None,
    model_path: of.ModelPath = None,
    weights_path: of.WeightsPath = None,
    method: of.Method = None,
    cpu_threads: of.Threads = None,
    numa_nodes: of.NumaNodes = None,
    max_running_requests: of.Slots = None,
    served_model_name: of.Name = None,
    api_key: of.ApiKey = None,
    trust_remote_code: of.TrustRemoteCode = False,
    yes: of.Yes = False,
    planned: of.Planned = True,
    dry_run: of.DryRun = False,
    as_json: options.AsJson = False,
    context_tokens: of.Context = None,
    linears: of.Linears = "auto",
    max_queue: of.MaxQueue = 256,
    max_tokens: of.MaxTokens = None,
    cors: of.Cors = None,
    allow_host: of.AllowHost = None,
    strict_model: of.StrictModel = False,
    grace: of.Grace = 30.0,
    quiet: of.Quiet = False,
    gpu_experts: of.GpuExperts = None,
    tensor_parallel_size: of.TensorParallel = None,
    kt_gpu_prefill_token_threshold: of.PrefillThreshold = None,
    attention_backend: of.AttentionBackend = None,
    max_total_tokens: of.MaxTotalTokens = None,
    chunked_prefill_size: of.ChunkedPrefill = None,
    mem_fraction_static: of.MemFraction = None,
    watchdog_timeout: of.Watchdog = None,
    shared_experts_fusion: of.SharedFusion = None,
) -> None:
    """Serve a model on this machine: OpenAI's interface and a chat page.

    Engine, method, threads, NUMA nodes and GPU experts are chosen from the machine and the model, and printed with
    their reasons. An option decides before config.yaml, that before the registry, and that before what is computed.
    Options that begin with 'Embedded' or 'SGLang' are of that engine only.
    """
    _run(context)


def _run(context: typer.Context) -> None:
    from kt_kernel.machine.facts import machine

    asked = _asked(context)
    here = machine()
    shown = bool(context.params["dry_run"])
    bound = None
    try:
        engine = _check_engine(context, asked, here, shown)
        if not shown:
            bound = _bind(context, engine)
        _start_logging(bool(context.params["quiet"]))
        from kt_kernel.launch.job import prepare

        job = prepare(asked, here, _fetch(bool(context.params["yes"])), only_shown=shown)
        (_sglang if engine == "sglang" else _embedded)(context, job, bound)
    except (UserError, typer.Exit, typer.Abort):
        raise  # main says the first, in the user's language; the others are said already
    except _EXPECTED as error:
        if env.debug():
            raise
        printing.fail("run", str(error) or type(error).__name__)
    finally:
        if bound is not None:
            bound.close()


def _asked(context: typer.Context) -> "Asked":
    """Errors of usage, and the question which model; nothing else is asked."""
    from kt_kernel.launch.job import Asked
    from kt_kernel.plan.choices import ENGINES

    values = context.params
    if values["as_json"] and not values["dry_run"]:
        raise typer.BadParameter(t("goes with --dry-run"), param_hint="--json")
    for name, legal, option in (("engine", ENGINES, "--engine"), ("linears", of.LINEARS, "--linears")):
        if values[name] is not None and values[name] not in legal:
            message = t("'{value}' is not one of {legal}", value=values[name], legal=", ".join(legal))
            raise typer.BadParameter(message, param_hint=option)
    options.check_threads(values["cpu_threads"])
    model, others = of.split(values["arguments"], values["model_path"])
    if model is None:
        model = _ask_model()
    typed = {name: value for name, value in values.items() if _is_typed(context, name)}
    return Asked(model, typed, tuple(others))


def _is_typed(context: typer.Context, name: str) -> bool:
    return context.get_parameter_source(name).name == "COMMANDLINE"


def _ask_model() -> str:
    """A menu of what is on this machine; without a terminal it is an error of usage."""
    if not (printing.is_terminal("stdin") and printing.is_terminal("stderr")):
        raise typer.BadParameter(t("name a model, as in 'kt run demo'"), param_hint="MODEL")
    from kt_kernel.registry.find import DEMO
    from kt_kernel.registry.user_models import user_models

    names = [DEMO, *(model.name for model in user_models())]
    for number, name in enumerate(names, 1):
        print(f"  {number}  {name}", file=sys.stderr)
    said = typer.prompt(t("Which model? A number, a name, or a folder"), default="1", err=True)
    return names[int(said) - 1] if said.isdecimal() and 1 <= int(said) <= len(names) else said


def _check_engine(context: typer.Context, asked: "Asked", here: "Machine", shown: bool) -> str:
    """Which engine it will be; options of the other one are errors of usage."""
    from kt_kernel.plan.choices import SGLANG, Wanted, choose_engine, has_sglang

    engine = str(choose_engine(here, Wanted(engine=asked.get("engine")), has_sglang(), shown).value)
    foreign = of.EMBEDDED_ONLY if engine == SGLANG else of.SGLANG_ONLY
    found = [option for name, option in foreign.items() if _is_typed(context, name)]
    if engine != SGLANG:
        found += [word for word in asked.others if word.startswith("-")] or list(asked.others)
    if found:
        there = {"embedded": "the embedded engine", "sglang": "SGLang"}[engine]
        message = t("{engine} does not know it; --engine takes another one", engine=there)
        raise typer.BadParameter(message, param_hint=" ".join(found))
    if engine != SGLANG and not shown:
        _check_extras()
    return engine


def _check_extras() -> None:
    missing = [module for module in _NEEDED if find_spec(module) is None]
    if missing and sys.version_info < _ENGINE_PYTHON:
        found = ".".join(map(str, sys.version_info[:2]))
        printing.fail("run", t("the embedded engine needs Python 3.11 or newer, this is {found}", found=found))
    if missing:
        printing.fail("run", t("{modules} not found: pip install 'kt-kernel[engine]'", modules=", ".join(missing)))


def _address(context: typer.Context) -> tuple[str, int]:
    host, port = context.params["host"], context.params["port"]
    return (
        str(settings.get("server.host")) if host is None else host,
        int(settings.get("server.port")) if port is None else port,
    )


def _bind(context: typer.Context, engine: str) -> "socket.socket | None":
    """Before the model is loaded: a port that is taken should not cost minutes. SGLang takes it itself, later."""
    import socket

    host, port = _address(context)
    if engine == "embedded":
        from kt_kernel.server.serving import bind

        return bind(host, port)
    try:
        with socket.create_server((host, port), reuse_port=False):
            return None
    except OSError as error:
        raise UserError(
            "cannot listen on {host}:{port} ({reason}); use --port or --host",
            host=host,
            port=port,
            reason=error.strerror,
        ) from None


def _fetch(yes: bool) -> "Callable[[Found], Path]":
    """Downloads a model after a question, or with --yes; elsewhere it says which command does."""

    def fetch(found: "Found") -> "Path":
        from kt_kernel.cli.model_files import bring
        from kt_kernel.registry.download import prepare
        from kt_kernel.registry.find import download_folder

        if not yes and not (printing.is_terminal("stdin") and printing.is_terminal("stderr")):
            raise UserError(
                "{name} is not on this machine: 'kt model download {name}' brings it, or --yes", name=found.name
            )
        download = prepare(str(found.repo), download_folder(str(found.repo)))
        if not yes:
            line = t(
                "{name} is not on this machine. Download {gb} GB to {folder}?",
                name=found.name,
                gb=f"{download.missing_bytes / 1e9:.1f}",
                folder=download.folder,
            )
            typer.confirm(line, abort=True, err=True)
        return Path(bring("run", download, found.name).path)

    return fetch


def _promise(job: "RunJob", planned: bool) -> "Plan | None":
    """Said first; a model that does not fit is refused. Nothing where the model's sizes are not known."""
    if not planned:
        return None
    if job.planner is None:
        printing.note("run", t("no plan: {reason}", reason=job.unplanned))
        return None
    from kt_kernel.cli.plan import progress
    from kt_kernel.cli.plan_report import busy_note, promise
    from kt_kernel.machine.probe import Probe
    from kt_kernel.plan.hints import hints

    with progress(False) as say:
        plan = job.planner.plan(Probe(job.machine, job.threads, say=say), 0.0)
    if not plan.chosen.fits:
        reasons = "; ".join(hints(plan, job.wanted))
        printing.fail("run", t("{name} does not fit: {reasons}; --no-plan tries", name=job.found.name, reasons=reasons))
    printing.note("run", t("expect decode at {promise}", promise=promise(plan.decode)))
    printing.note("run", t("expect prompts at {promise}", promise=promise(plan.prefill)))
    if line := busy_note(plan):
        printing.note("run", line)
    return plan


def _embedded(context: typer.Context, job: "RunJob", bound: "socket.socket | None") -> None:
    from kt_kernel.cli.plan_report import name_of
    from kt_kernel.launch import embedded

    values = context.params
    for choice in job.choices():
        _explain(name_of(choice.name), choice)
    plan = _promise(job, values["planned"] and not values["dry_run"])
    nodes = job.wanted.nodes
    engine_options = {
        "slots": job.wanted.slots,
        "context": job.wanted.context,
        "threads": job.threads,
        "numa_nodes": list(nodes) if nodes else None,
        "method": job.method,
        "weight_path": values["weights_path"],
        "linears": None if values["linears"] == "torch" else values["linears"],
        "max_queue": values["max_queue"],
        "trust_remote_code": values["trust_remote_code"],
    }
    host, port = _address(context)
    if values["dry_run"]:
        settings_shown = {**engine_options, "host": host, "port": port, "name": job.name}
        _show_embedded(job, settings_shown, values["as_json"])
        return
    key = values["api_key"] or env.api_key()
    found = embedded.server_settings(
        host, key, values["cors"], values["allow_host"], values["strict_model"], values["grace"]
    )
    in_flight = values["max_queue"] + found.limits.in_flight
    limits = replace(found.limits, max_tokens=values["max_tokens"], in_flight=in_flight)
    promised = plan.decode.tokens_per_s if plan else None
    serving = embedded.Serving(str(job.folder), job.name, engine_options, promised)
    embedded.serve(serving, bound, replace(found, limits=limits))


def _show_embedded(job: "RunJob", chosen: dict[str, object], as_json: bool) -> None:
    command = ["kt", "run", str(job.folder), "--engine", "embedded"]
    for name, value in chosen.items():
        words = value if isinstance(value, list) else [value]
        option = _OPTIONS.get(name, f"--{name.replace('_', '-')}")
        command += [part for word in words if word not in (None, False) for part in (option, str(word))]
    command = [word for word in command if word != "True"]
    if as_json:
        choices = {choice.name: {"value": choice.value, "reason": choice.reason} for choice in job.choices()}
        shown = {"engine": "embedded", "command": command, "shell": shlex.join(command)}
        printing.print_json({**shown, "settings": chosen, "choices": choices})
    else:
        print(shlex.join(command))


def _sglang(context: typer.Context, job: "RunJob", _: object) -> None:
    from kt_kernel.cli.plan_report import name_of
    from kt_kernel.launch import sglang, sglang_reached
    from kt_kernel.launch.job import model_argument, sglang_launch
    from kt_kernel.launch.sglang_options import Server

    values = context.params
    host, port = _address(context)
    key = values["api_key"] or env.api_key()
    server = Server(
        host,
        port,
        model_argument(job),
        Path(values["weights_path"]) if values["weights_path"] else None,
        values["trust_remote_code"] or job.found.known is not None,
        "KEY" if key and values["dry_run"] else key,
        len(values["numa_nodes"] or ()) > 1,
    )
    launch, choices = sglang_launch(job, server)
    _explain(name_of("engine"), job.engine)
    if job.chosen is not None and job.chosen.all_on_gpu:
        printing.note("run", t("the GPU holds all experts: SGLang computes them; --gpu-experts leaves some to the CPU"))
    for choice in choices:
        if choice.name != "api-key":
            _explain(f"--{choice.name}", choice)
    for option in launch.left_out:
        printing.note("run", t("{option} is left out: this SGLang does not know it", option=option))
    if values["dry_run"]:
        _show_sglang(launch, choices, values["as_json"])
        return
    plan = _promise(job, values["planned"])
    if plan is not None:
        sglang_reached.follow(host, port, key, plan.decode.tokens_per_s)
    sglang.start(launch)


def _show_sglang(launch: "Launch", choices: "list[Choice]", as_json: bool) -> None:
    if not as_json:
        print(launch.as_shell())
        return
    shown = {
        "engine": "sglang",
        "command": list(launch.command),
        "environment": dict(launch.environment),
        "shell": launch.as_shell(),
        "left_out": list(launch.left_out),
        "choices": {f"--{choice.name}": {"value": choice.value, "reason": choice.reason} for choice in choices},
    }
    printing.print_json(shown)


def _explain(name: str, choice: "Choice") -> None:
    from kt_kernel.cli.plan_report import choice_line

    printing.note("run", f"{name}: {choice_line(choice)}")


def _start_logging(quiet: bool) -> None:
    """What the engine chooses, requests, and warnings of libraries, on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    ours = logging.getLogger("kt_kernel")
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False
    if quiet:
        logging.getLogger("kt_kernel.server").setLevel(logging.WARNING)
    # Requests that are no HTTP are answered; a scanner must not fill the log.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)

"""``kt run``: chooses how to run a model, says why, and serves it."""

import logging
import sys
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import kt_kernel
from kt_kernel import env
from kt_kernel.cli import options

if TYPE_CHECKING:
    import socket

    from kt_kernel.server.settings import Settings

DEMO = "demo"
_NEEDED = ("h11", "jinja2", "msgspec", "starlette", "transformers", "uvicorn")  # the extra; a test compares
_LINEARS = ("auto", "bf16", "int8", "int4", "int4g", "torch")  # torch: not packed
_LOOPBACK_NAMES = ("127.0.0.1", "::1", "localhost")
# What a model or a setting that does not fit raises; anything else is a fault of ours and keeps its traceback.
_EXPECTED = (OSError, ValueError, RuntimeError, ImportError, MemoryError)


@dataclass(frozen=True)
class Choice:
    """What is going to run, and the reasons."""

    model: str
    name: str | None = None  # under which it is served; None: the folder's
    reasons: list[str] = field(default_factory=list)


Model = Annotated[str, typer.Argument(help=f"The folder of a model, or '{DEMO}' for a small one that is made here.")]
Host = Annotated[str, typer.Option("--host", help="Where to listen; 0.0.0.0 for every network.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")]
Slots = Annotated[
    int | None, typer.Option("--slots", min=1, max=1024, help="Answers at once (default: what memory allows).")
]
Context = Annotated[
    int | None, typer.Option("--context", min=16, help="Tokens of prompt and answer (default: what memory allows).")
]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="Worker threads (default: one for each physical core).")
]
Method = Annotated[str, typer.Option("--method", "-m", help="How experts are packed: auto, BF16, AMXINT8, INT4G, ...")]
Linears = Annotated[str, typer.Option("--linears", help=f"How all other matrices are packed: {', '.join(_LINEARS)}.")]
MaxQueue = Annotated[int, typer.Option("--max-queue", min=0, help="Requests that may wait; more get 429.")]
MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", min=1, help="Longest answer (default: up to the context).")
]
Name = Annotated[str | None, typer.Option("--name", help="What the model is called (default: its folder).")]
ApiKey = Annotated[str | None, typer.Option("--api-key", help="Ask clients for this key (better: KT_KERNEL_API_KEY).")]
Cors = Annotated[
    list[str] | None, typer.Option("--cors", help="Origin of a web page that may call; repeat for more; '*' is all.")
]
AllowHost = Annotated[
    list[str] | None, typer.Option("--allow-host", help="Another name under which clients call the server.")
]
StrictModel = Annotated[
    bool, typer.Option("--strict-model", help="Refuse requests for other models instead of answering all.")
]
Grace = Annotated[
    float, typer.Option("--grace", min=0, help="Seconds that running answers get when the server is stopped.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No line for each request.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
]


def run(
    model: Model,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    slots: Slots = None,
    context: Context = None,
    threads: Threads = None,
    method: Method = "auto",
    linears: Linears = "auto",
    max_queue: MaxQueue = 256,
    max_tokens: MaxTokens = None,
    name: Name = None,
    api_key: ApiKey = None,
    cors: Cors = None,
    allow_host: AllowHost = None,
    strict_model: StrictModel = False,
    grace: Grace = 30.0,
    quiet: Quiet = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Serve a model on this machine: OpenAI's interface and a chat page.

    The embedded engine runs it on the CPU, with experts on the kernels of kt-kernel.
    """
    _check_extras()
    threads = options.check_threads(threads)
    if linears not in _LINEARS:
        raise typer.BadParameter(f"'{linears}' is not one of {', '.join(_LINEARS)}", param_hint="--linears")
    api_key = api_key or env.api_key()
    _start_logging(quiet)
    bound = None
    try:
        from kt_kernel.server.serving import bind

        # Before the model is loaded: a port that is taken should not cost minutes.
        bound = bind(host, port)
        choice = choose(model, name)
        explain(choice)
        engine_options = {
            "slots": slots,
            "context": context,
            "threads": threads,
            "method": method,
            "linears": None if linears == "torch" else linears,
            "max_queue": max_queue,
            "trust_remote_code": trust_remote_code,
        }
        settings = _settings(host, api_key, cors, allow_host, strict_model, grace)
        limits = replace(settings.limits, max_tokens=max_tokens, in_flight=max_queue + settings.limits.in_flight)
        settings = replace(settings, limits=limits)
        start(choice, engine_options, bound, settings)
    except _EXPECTED as error:
        if env.debug():
            raise
        print(f"kt run: {_one_line(error)}", file=sys.stderr)
        raise typer.Exit(1) from None
    finally:
        if bound is not None:
            bound.close()


def choose(model: str, name: str | None) -> Choice:
    """Which files to run and by which engine. OSError or ValueError where nothing fits."""
    variant = f"experts on the CPU's {kt_kernel.__cpu_variant__} kernels"
    if model == DEMO:
        from kt_kernel.demo import demo_model

        folder = demo_model()
        return Choice(str(folder), name or DEMO, [f"the demo model, in {folder}", f"embedded engine: {variant}"])
    folder = Path(model).expanduser()
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise FileNotFoundError(f"'{model}' {what}: give the folder of a model, with config.json in it, or '{DEMO}'")
    return Choice(str(folder), name, [f"the model in {folder.resolve()}", f"embedded engine: {variant}"])


def explain(choice: Choice) -> None:
    for reason in choice.reasons:
        print(f"kt run: {reason}", file=sys.stderr)


def start(choice: Choice, engine_options: dict[str, object], bound: "socket.socket", settings: "Settings") -> None:
    """Loads the model and serves it until a signal comes."""
    from kt_kernel.engine.load import open_engine
    from kt_kernel.server.serving import base_url, serve

    engine = open_engine(choice.model, name=choice.name, **engine_options)
    url = base_url(bound)

    def say_where() -> None:
        key = '-H "Authorization: Bearer $KT_KERNEL_API_KEY" ' if settings.api_key else ""
        body = '{"messages": [{"role": "user", "content": "Hello!"}]}'
        print(f"{engine.name} is up; Ctrl-C stops it")
        print(f"  chat page  {url}/")
        print(f"  API        {url}/v1")
        print(
            f"  try        curl {url}/v1/chat/completions -H 'Content-Type: application/json' {key}-d '{body}'",
            flush=True,
        )

    serve(engine, bound, settings, say_where)


def _settings(
    host: str,
    api_key: str | None,
    cors: list[str] | None,
    allow_host: list[str] | None,
    strict_model: bool,
    grace: float,
) -> "Settings":
    from kt_kernel.server.serving import is_loopback
    from kt_kernel.server.settings import Settings

    hosts = tuple(allow_host or ())
    if is_loopback(host):
        hosts += (*_LOOPBACK_NAMES, host)
    elif api_key is None:
        print(f"kt run: whoever reaches {host} may use the model; --api-key asks for a key", file=sys.stderr)
    return Settings(
        api_key=api_key,
        cors=tuple(cors or ()),
        hosts=hosts,
        strict_model=strict_model,
        grace_seconds=grace,
    )


def _check_extras() -> None:
    missing = [module for module in _NEEDED if find_spec(module) is None]
    if missing:
        print(f"kt run: {', '.join(missing)} not found: pip install 'kt-kernel[engine]'", file=sys.stderr)
        raise typer.Exit(1)


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


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text or type(error).__name__

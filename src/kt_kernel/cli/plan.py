"""``kt plan``: what a model needs and what it will do on this machine, before anything is loaded."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from kt_kernel.cli import options, printing
from kt_kernel.cli.language import t

if TYPE_CHECKING:
    from kt_kernel.machine.facts import Machine
    from kt_kernel.plan.choices import Wanted
    from kt_kernel.plan.plan import Plan

Model = Annotated[str, typer.Argument(help="A folder, a name or alias, a hub id, or 'demo'; it need not be here yet.")]
Engine = Annotated[str | None, typer.Option("--engine", help="embedded or sglang (default: what kt run would take).")]
Method = Annotated[str | None, typer.Option("--method", "-m", help="Of the experts (default: the first that fits).")]
Context = Annotated[int | None, typer.Option("--context", min=16, help="Tokens of prompt and answer.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Worker threads (default: physical cores).")]
GpuExperts = Annotated[
    int | None, typer.Option("--gpu-experts", min=0, help="Experts of each layer on the GPU (default: what fits).")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Measure the machine again, whatever was measured before.")]

EXAMPLES = printing.examples("kt plan demo", "kt plan qwen3-30b --context 16384")


def plan(
    model: Model,
    engine: Engine = None,
    method: Method = None,
    context: Context = None,
    threads: Threads = None,
    gpu_experts: GpuExperts = None,
    fresh: Fresh = False,
    as_json: options.AsJson = False,
) -> None:
    """Say what a model needs and how fast it will be here, before anything is loaded or downloaded.

    The first plan measures the machine, for ten seconds at most; later ones use what was measured.
    """
    from kt_kernel.plan.choices import ENGINES, Wanted

    if engine is not None and engine not in ENGINES:
        raise typer.BadParameter(t("'{engine}' is not one of embedded, sglang", engine=engine), param_hint="--engine")
    threads = options.check_threads(threads)
    wanted = Wanted(engine=engine, method=method, context=context, threads=threads, gpu_experts=gpu_experts)
    with progress(as_json) as say:
        found, machine = make_plan(model, wanted, fresh, say)
    from kt_kernel.cli import plan_report

    if as_json:
        printing.print_json(plan_report.as_dict(found, machine, wanted))
    else:
        plan_report.show(found, machine, wanted)
    if not found.chosen.fits:
        raise typer.Exit(1)


def make_plan(
    text: str, wanted: "Wanted", fresh: bool = False, say: Callable[[str], None] = lambda line: None
) -> "tuple[Plan, Machine]":
    """Of what a user typed. UserError where it is no model, or its sizes are not known."""
    from kt_kernel.machine.facts import machine
    from kt_kernel.machine.probe import Probe
    from kt_kernel.plan.choices import has_sglang
    from kt_kernel.plan.plan import Planner
    from kt_kernel.plan.resolve import planned

    found = planned(text)
    here = machine()
    planner = Planner(found.model, here, wanted, found.folder, found.default_method, has_sglang())
    chosen = planner.choose()
    if wanted.gpu_experts is not None and chosen.gpu is None:
        message = t("this would run on the embedded engine, without a GPU")
        raise typer.BadParameter(message, param_hint="--gpu-experts")
    return planner.plan(Probe(here, chosen.threads, fresh=fresh, say=say)), here


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """What is being measured, on one line of a terminal that is gone afterwards."""
    shown = printing.is_terminal("stderr") and not quiet

    def say(line: str) -> None:
        if shown:
            print(f"\r\x1b[K{t('measuring')}: {line}", end="", file=sys.stderr, flush=True)

    try:
        yield say
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

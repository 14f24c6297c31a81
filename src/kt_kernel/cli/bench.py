"""``kt bench``: measure this machine, our kernels on it, and other implementations beside them."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

import kt_kernel
from kt_kernel.bench import hybrid, kernels, peers, progress, results, roofline, serve, shapes, wheel
from kt_kernel.bench.errors import BenchError
from kt_kernel.bench.run import Findings, Settings
from kt_kernel.cli import bench_options, options, printing
from kt_kernel.cli.language import t
from kt_kernel.machine import system

app = typer.Typer(
    help="Measure this machine, our kernels on it, and other implementations beside them.",
    invoke_without_command=True,
    rich_markup_mode=None,
    epilog=printing.examples("kt bench", "kt bench limits --json"),
)

_RESULTS = Path("bench/results")
_QUIET = 0.05  # CPU share of others that a measurement survives
_PEER_FORMATS = tuple(peers.TOLERANCE)
_SERVE_PARTS = ",".join(serve.PARTS)


@app.callback()
def _bench(
    context: typer.Context,
    threads: options.Threads = None,
    variant: options.Variant = None,
    seconds: bench_options.Seconds = 1.0,
    shape: bench_options.ShapeNames = bench_options.DEFAULT_SHAPE,
    formats: bench_options.Formats = "bf16,int8,int4,int4g",
    tokens: bench_options.Tokens = "1,16,256,2048",
    as_json: options.AsJson = False,
    plot: bench_options.Plot = None,
    save: bench_options.Save = False,
    machine: bench_options.Machine = None,
) -> None:
    """Without a subcommand: limits, then kernels."""
    if context.invoked_subcommand is None:
        _kernels(threads, variant, seconds, shape, formats, tokens, as_json, plot, save, machine)
    elif any(context.get_parameter_source(name).name == "COMMANDLINE" for name in context.params):
        options.reject("kt bench", t("options go behind '{command}'", command=context.invoked_subcommand))


@app.command(epilog=printing.examples("kt bench limits --variant avx2"))
def limits(
    threads: options.Threads = None,
    variant: options.Variant = None,
    seconds: bench_options.Seconds = 1.0,
    as_json: options.AsJson = False,
    save: bench_options.Save = False,
    machine: bench_options.Machine = None,
) -> None:
    """Read bandwidth and arithmetic peaks of this machine."""
    settings = Settings(options.variants(variant), options.check_threads(threads), seconds)
    _run(len(settings.variants), [lambda *to: kernels.measure_limits(settings, *to)], as_json, None, save, machine)


@app.command("kernels", epilog=printing.examples("kt bench kernels --shape qwen3-30b --formats int4g --tokens 1,16"))
def _kernels(
    threads: options.Threads = None,
    variant: options.Variant = None,
    seconds: bench_options.Seconds = 1.0,
    shape: bench_options.ShapeNames = bench_options.DEFAULT_SHAPE,
    formats: bench_options.Formats = "bf16,int8,int4,int4g",
    tokens: bench_options.Tokens = "1,16,256,2048",
    as_json: options.AsJson = False,
    plot: bench_options.Plot = None,
    save: bench_options.Save = False,
    machine: bench_options.Machine = None,
) -> None:
    """One MoE layer: GB/s, TFLOPS, and what share of the limits that is."""
    settings = _settings(options.variants(variant), threads, seconds, shape, formats, shapes.FORMATS, tokens)
    parts = [lambda *to: kernels.measure_limits(settings, *to), lambda *to: kernels.measure_kernels(settings, *to)]
    _run(len(settings.variants) * (1 + settings.points), parts, as_json, plot, save, machine)


@app.command("hybrid", epilog=printing.examples("kt bench hybrid --shape dsv3"))
def _hybrid(
    threads: options.Threads = None,
    variant: options.Variant = None,
    seconds: bench_options.Seconds = 1.0,
    shape: bench_options.ShapeNames = bench_options.DEFAULT_SHAPE,
    formats: bench_options.Formats = "bf16,int8,int4,int4g",
    tokens: bench_options.Tokens = "1,16,256,2048",
    as_json: options.AsJson = False,
    save: bench_options.Save = False,
    machine: bench_options.Machine = None,
) -> None:
    """One MoE layer beside a GPU: shares of the limits, overlap, and what submit and sync cost. Needs a GPU."""
    settings = _settings(options.variants(variant), threads, seconds, shape, formats, shapes.FORMATS, tokens)
    parts = [lambda *to: hybrid.measure_hybrid(settings, *to)]
    _run(len(settings.variants) * settings.points, parts, as_json, None, save, machine)


@app.command("peers", epilog=printing.examples("kt bench peers --formats int4 --tokens 1"))
def _peers(
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="For both sides (default: the best of a few, for each).")
    ] = None,
    variant: Annotated[
        str | None, typer.Option("--variant", help="Instruction sets (default: avx2 and the best one).")
    ] = None,
    seconds: bench_options.Seconds = 2.0,
    shape: bench_options.ShapeNames = bench_options.DEFAULT_SHAPE,
    formats: Annotated[
        str, typer.Option("--formats", help=t("Out of {names}.", names=", ".join(_PEER_FORMATS)))
    ] = "bf16,int8,int4",
    tokens: bench_options.Tokens = "1,16,256,2048",
    peer_path: Annotated[
        Path | None,
        typer.Option("--peer-path", help=t("An unpacked {wheel} wheel, instead of a download.", wheel=wheel.RELEASED)),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            help=t(
                "One of our own formats instead: {names}; --formats out of them too.", names=", ".join(shapes.QUANTISED)
            ),
        ),
    ] = None,
    as_json: options.AsJson = False,
    save: bench_options.Save = False,
    machine: bench_options.Machine = None,
) -> None:
    """The released kt-kernel (GGUF types: llama.cpp) and us, in turns, each with its best thread count."""
    if against is not None:
        options.check_one("--against", against, shapes.QUANTISED)
    if peer_path is not None and not (peer_path / "kt_kernel").is_dir():
        options.reject("--peer-path", t("'{path}' holds no kt_kernel folder: unpack the wheel there", path=peer_path))
    names = options.variants(variant) if variant else list(dict.fromkeys(["avx2", kt_kernel.__cpu_variant__]))
    known = shapes.QUANTISED if against else _PEER_FORMATS
    settings = _settings(names, threads, seconds, shape, formats, known, tokens)
    parts = [lambda *to: peers.measure_peers(settings, *to, peer_path, against)]
    _run(len(names) * settings.points, parts, as_json, None, save, machine)


@app.command("serve", epilog=printing.examples("kt bench serve --parts demo,http"))
def _serve(
    threads: options.Threads = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=100, help="Turns of each side.")] = 5,
    steps: Annotated[int, typer.Option("--steps", min=4, max=512, help="Tokens of each answer in a turn.")] = 48,
    parts: Annotated[
        str, typer.Option("--parts", help="Out of demo,http,overhead,large,latent.")
    ] = "demo,http,overhead,large,latent",
    layers: Annotated[
        int | None, typer.Option("--layers", min=1, max=48, help="Of the large model (default: what fits).")
    ] = None,
    memory: Annotated[float, typer.Option("--memory", min=1, help="GB for the large model.")] = 20.0,
    as_json: options.AsJson = False,
    save: bench_options.Save = False,
    machine: bench_options.Machine = None,
) -> None:
    """Whole models: the demo model beside transformers and llama.cpp, the engine's overhead, large models."""
    names = tuple(parts.split(","))
    for name in names:
        options.check_one("--parts", name, serve.PARTS)
    settings = serve.ServeSettings(
        options.check_threads(threads), rounds, steps, names, layers, int(memory * 1_000_000_000)
    )
    _run(settings.points, [lambda *to: serve.measure_serve(settings, *to)], as_json, None, save, machine)


@app.command("quality", epilog=printing.examples("kt bench quality --methods BF16,INT4G"))
def _quality(
    methods: Annotated[
        str | None, typer.Option("--methods", help="Out of BF16, AMXINT8, ..., separated by commas (default: all).")
    ] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=2, help="Of the text (default: all).")] = None,
    page: Annotated[Path | None, typer.Option("--page", help="Write the table as Markdown to this file.")] = None,
    as_json: options.AsJson = False,
    save: bench_options.Save = False,
    machine: bench_options.Machine = None,
) -> None:
    """What each method costs the demo model in perplexity."""
    from kt_kernel.bench import quality, quality_page

    wanted = methods.split(",") if methods else None
    known = dict.fromkeys(case.method for case in quality.CASES)
    for name in wanted or ():
        options.check_one("--methods", name, known)
    cases = [case for case in quality.CASES if wanted is None or case.method in wanted]
    parts = [lambda *to: quality.measure_quality(cases, *to, tokens)]
    if page is not None:
        parts.append(lambda findings, _: quality_page.write(findings.figures, page))
    _run(1 + len(cases), parts, as_json, None, save, machine)


def _settings(
    names: list[str],
    threads: int | None,
    seconds: float,
    shape: list[str],
    formats: str,
    known: tuple[str, ...],
    tokens: str,
) -> Settings:
    return Settings(
        names,
        options.check_threads(threads),
        seconds,
        bench_options.shape_list(shape),
        options.format_list(formats, known),
        bench_options.token_list(tokens),
    )


def _run(
    points: int,
    parts: list[Callable],
    as_json: bool,
    plot: Path | None,
    save: bool,
    machine: str | None,
) -> None:
    """Measures, then prints, plots and saves. Anything that keeps a figure from being taken ends with exit code 1."""
    machine = bench_options.machine_name(machine)
    findings = Findings()
    busy = system.busy_share()
    if busy > _QUIET:
        share = f"{busy:.0%}"
        findings.note(
            t(
                "other processes used {share} of the CPUs at the start: times and ratios suffer, peers' most",
                share=share,
            )
        )
    try:
        with progress.Progress(points) as bar:
            for part in parts:
                part(findings, bar)
        run = results.document(findings, kt_kernel.__version__)
        if as_json:
            print(json.dumps(run, indent=1))
        else:
            from kt_kernel.bench import report

            report.show(run)
        if plot is not None:
            roofline.plot(run, plot)
            print(t("wrote {path}", path=plot), file=sys.stderr)
        if save:
            for path in results.save(run, _RESULTS, machine):
                print(t("wrote {path}", path=path), file=sys.stderr)
        if findings.failed:
            raise typer.Exit(1)
    except (BenchError, OSError) as error:
        print(f"kt bench: {error}", file=sys.stderr)
        raise typer.Exit(1) from None

"""``kt verify``: proof that this machine computes the right thing."""

from typing import Annotated

import typer

from kt_kernel.cli import options
from kt_kernel.cli.language import t
from kt_kernel.cli.printing import examples, fail, note, print_json, table

Model = Annotated[
    str | None, typer.Argument(help="A folder, a name or 'demo': also compares a layer of it, and its answers.")
]
Method = Annotated[str, typer.Option("--method", "-m", help="How experts are packed: auto, BF16, AMXINT8, INT4G, ...")]
Layer = Annotated[int | None, typer.Option("--layer", min=0, help="The layer to compare (default: one in the middle).")]
Tokens = Annotated[
    int | None, typer.Option("--tokens", min=16, max=1024, help="Tokens of the text that the model reads.")
]
Formats = Annotated[
    str | None, typer.Option("--formats", help="Only these formats of weights, separated by commas (default: all).")
]
Variants = Annotated[
    str | None,
    typer.Option("--variant", help="Only these instruction sets, separated by commas (default: all that run here)."),
]
Quick = Annotated[
    bool, typer.Option("--quick", help="Only the instruction set in use, one shape, a shorter text: seconds.")
]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="Worker threads for the model (default: one for each core).")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
]

EXAMPLES = examples("kt verify --quick", "kt verify demo --method INT4G")


def verify(
    model: Model = None,
    method: Method = "auto",
    layer: Layer = None,
    tokens: Tokens = None,
    formats: Formats = None,
    variant: Variants = None,
    quick: Quick = False,
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: options.AsJson = False,
) -> None:
    """Compare the kernels with a reference in fp64, a layer of a model with torch, and its answers with bf16.

    Exit code 1 if anything is further off than rounding allows.
    """
    from kt_kernel.bench.progress import Progress
    from kt_kernel.methods import NAMES
    from kt_kernel.verify import random_experts, run

    if method not in ("auto", *NAMES):
        raise typer.BadParameter(
            t("'{name}' is not one of {legal}", name=method, legal=", ".join(("auto", *NAMES))), param_hint="--method"
        )
    request = run.Request(
        path=None if model is None else _path(model),
        method=method,
        layer_idx=layer,
        threads=options.check_threads(threads),
        tokens=tokens,
        quick=quick,
        trust_remote_code=trust_remote_code,
        formats=tuple(options.format_list(formats, tuple(random_experts.formats())) if formats else ()),
        variants=tuple(options.variants(variant)) if variant else (),
    )
    with Progress(request.points) as bar:
        report = run.verify(request, bar)
    if as_json:
        print_json(report)
    else:
        _show(report)
    if not report["ok"]:
        raise typer.Exit(1)


def _path(model: str) -> str:
    from kt_kernel.registry.find import DEMO, find

    if model == DEMO:
        from kt_kernel.demo import DemoError, demo_model

        try:
            return str(demo_model())
        except DemoError as error:
            fail("verify", str(error))
    found = find(model)
    if found.path is None:
        fail(
            "verify",
            t("'{name}' is not on this machine: 'kt model download {repo}' fetches it", name=model, repo=found.repo),
        )
    from kt_kernel.weights import model_config

    try:
        model_config(found.path)
    except (OSError, ValueError) as error:
        fail("verify", str(error))
    return str(found.path)


def _show(report: dict) -> None:
    from kt_kernel.verify.run import parts_of

    if report["kernels"]:
        variants = list(dict.fromkeys(row["variant"] for row in report["kernels"]))
        formats = list(dict.fromkeys(row["format"] for row in report["kernels"]))
        cells = {(row["format"], row["variant"]): _cell(row) for row in report["kernels"]}
        print(t("Relative error of layers against fp64"))
        table([t("Format"), *variants], [[name, *(cells[name, variant] for variant in variants)] for name in formats])
    if report["slices"]:
        names = [f"{row['format']} {t('FAILED')}" if row["failures"] else row["format"] for row in report["slices"]]
        ranks = ", ".join(map(str, report["slices"][0]["ranks"]))
        print(t("Slices for {ranks} GPUs, byte by byte: {names}", ranks=ranks, names=", ".join(names)))
    if report["layer"]:
        _show_layer(report["layer"])
    if report["model"]:
        _show_model(report["model"])
    for part in parts_of(report):
        name = " ".join(str(part[key]) for key in ("format", "variant") if key in part)
        for failure in part.get("failures", ()):
            note("verify", f"{name}: {failure}" if name else failure)
    calls = sum(row.get("calls", 0) for row in report["kernels"])
    if report["ok"]:
        print(t("Right: {calls} calls of kernels in {seconds} s.", calls=calls, seconds=report["seconds"]))
    else:
        print(t("NOT PROVEN RIGHT: do not trust this machine's output before the lines on stderr are gone."))


def _cell(row: dict) -> str:
    if row["failures"]:
        return t("FAILED")
    return f"{row['relative_error']:.4f}"


def _show_layer(found: dict) -> None:
    if "layer" not in found:
        return
    against = t("nothing to compare its weights with") if found["relative_error"] is None else ""
    print(
        t(
            "Layer {layer}, {method} ({format}), {count} experts, against torch: {error} (limit {limit})",
            layer=found["layer"],
            method=found["method"],
            format=found["format"],
            count=len(found["experts"]),
            error=against or f"{found['relative_error']:.4f}",
            limit=f"{found['limit']:.4f}",
        )
    )


def _show_model(found: dict) -> None:
    if "skipped" in found:
        print(t("Whole model: not measured ({reason})", reason=found["skipped"]))
    elif "divergence" in found:
        print(
            t(
                "Whole model, {tokens} tokens: divergence {divergence} from bf16 (limit {limit}), perplexity "
                "{perplexity} beside {reference}, {same} same tokens",
                tokens=found["tokens"],
                divergence=_number(found["divergence"]),
                limit=found["limit"],
                perplexity=_number(found["perplexity"]),
                reference=_number(found["reference_perplexity"]),
                same=f"{found['same_token']:.1%}",
            )
        )


def _number(value: float | None) -> str:
    return "NaN" if value is None else f"{value:.4g}"

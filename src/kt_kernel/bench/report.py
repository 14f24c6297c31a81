"""Tables for people."""

import sys

from rich.console import Console
from rich.table import Table

# Piped output has no width of its own; wide enough for the widest table.
_PIPE_WIDTH = 180


def show(run: dict) -> None:
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    facts = run["machine"]
    console.print(
        f"{facts['cpu']}, {facts['cores']} cores, {facts['cpus']} CPUs, L3 {facts['l3_bytes'] >> 20} MB",
        highlight=False,
    )
    if run["limits"]:
        console.print(_limits(run["limits"]))
    for part, title, columns in _PARTS:
        figures = [figure for figure in run["figures"] if figure["part"] == part]
        if figures:
            console.print(_figures(title, columns, figures))
    for note in run["notes"]:
        console.print(f"note: {note}", highlight=False, markup=False)


def _limits(limits: dict) -> Table:
    table = _table("limits", [("variant", False), ("threads", True), ("unit", False), ("best", True)])
    for variant, found in limits.items():
        table.add_row(variant, str(found["threads"]), "read", f"{found['read_gbps']:.1f} GB/s")
        for unit, ops in found["peaks"].items():
            table.add_row("", "", unit, f"{ops / 1e12:.3f} T{'OPS' if 'u8s8' in unit else 'FLOPS'}")
    return table


# (heading, right-aligned, text of a figure)
_KERNEL_COLUMNS = (
    ("variant", False, lambda f: f["variant"]),
    ("shape", False, lambda f: f["shape"]),
    ("format", False, lambda f: f["format"]),
    ("experts", True, lambda f: str(f["experts"])),
    ("T", True, lambda f: str(f["tokens"])),
    ("us", True, lambda f: f"{f['us']:.0f}"),
    ("best us", True, lambda f: f"{f['best_us']:.0f}"),
    ("GB/s", True, lambda f: f"{f['gbps']:.1f}"),
    ("of read", True, lambda f: _percent(f["read_share"])),
    ("TFLOPS", True, lambda f: f"{f['tflops']:.3f}"),
    ("of peak", True, lambda f: _percent(f["peak_share"])),
    ("peak", False, lambda f: f["peak_unit"] or "-"),
    ("of fed", True, lambda f: _percent(f.get("fed_share"))),
    ("of 2x2", True, lambda f: _percent(f.get("2x2_share"))),
    ("roofline", True, lambda f: _percent(f["roofline_share"])),
    ("x bf16", True, lambda f: f"{f['vs_bf16']:.2f}" if f.get("vs_bf16") else "-"),
)

_HYBRID_COLUMNS = (
    *_KERNEL_COLUMNS[:12],  # up to the unit of the peak
    ("overlap", True, lambda f: _percent(f["overlap"])),
    ("submit+sync us", True, lambda f: f"{f['submit_sync_us']:.1f}"),
    ("error", True, lambda f: f"{f['error']:.4f}"),
)

_PEER_COLUMNS = (
    *_KERNEL_COLUMNS[:5],
    ("our us", True, lambda f: f"{f['us']:.0f}"),
    ("GB/s", True, lambda f: f"{f['gbps']:.1f}"),
    ("TFLOPS", True, lambda f: f"{f['tflops']:.3f}"),
    ("threads", True, lambda f: str(f["threads"])),
    ("peer", False, lambda f: f["peer"]),
    ("peer us", True, lambda f: f"{f['peer_us']:.0f}"),
    ("GB/s", True, lambda f: f"{f['peer_gbps']:.1f}"),
    ("TFLOPS", True, lambda f: f"{f['peer_tflops']:.3f}"),
    ("threads", True, lambda f: str(f["peer_threads"])),
    ("speedup", True, lambda f: f"{f['speedup']:.2f}x"),
    ("outputs differ by", True, lambda f: f"{f['error_between']:.4f}"),
)

_QUALITY_COLUMNS = (
    ("variant", False, lambda f: f["variant"]),
    ("method", False, lambda f: f["method"]),
    ("weights", False, lambda f: f["weights"]),
    ("bytes/weight", True, lambda f: f"{f['bytes_per_weight']:.2f}"),
    ("perplexity", True, lambda f: f"{f['perplexity']:.3f}"),
    ("change", True, lambda f: f"{100 * f['change']:+.2f}%"),
    ("divergence", True, lambda f: f"{f['divergence']:.4f}"),
    ("same token", True, lambda f: f"{100 * f['same_token']:.1f}%"),
)

_SERVE_COLUMNS = (
    ("variant", False, lambda f: f["variant"]),
    ("model", False, lambda f: f["model"]),
    ("phase", False, lambda f: f["phase"]),
    ("batch", True, lambda f: str(f["batch"])),
    ("method", False, lambda f: f["method"]),
    ("decoder", False, lambda f: f.get("decoder", "-")),
    ("tokens/s", True, lambda f: f"{f['tokens_per_s']:.1f}"),
    ("x batch 1", True, lambda f: _times(f, "vs_batch_1")),
    ("x stock", True, lambda f: _times(f, "vs_stock")),
    ("x llama.cpp", True, lambda f: _times(f, "vs_llamacpp")),
    ("x transformers", True, lambda f: _times(f, "vs_transformers")),
    ("x no HTTP", True, lambda f: _times(f, "vs_engine")),
    ("overhead us", True, lambda f: f"{f['overhead_us']:.0f}" if "overhead_us" in f else "-"),
    ("of read", True, lambda f: _percent(f.get("read_share"))),
)


def _times(figure: dict, name: str) -> str:
    return f"{figure[name]:.2f}" if name in figure else "-"


def _figures(title: str, columns: tuple, figures: list[dict]) -> Table:
    table = _table(title, [(heading, right) for heading, right, _ in columns])
    for figure in figures:
        table.add_row(*(text(figure) for _, _, text in columns))
    return table


def _table(title: str, columns: list[tuple[str, bool]]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for heading, right in columns:
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"


_PARTS = (
    ("kernels", "kernels", _KERNEL_COLUMNS),
    ("hybrid", "hybrid: from GPU tensor to GPU tensor", _HYBRID_COLUMNS),
    ("serve", "serve: whole models; other implementations and us in turns", _SERVE_COLUMNS),
    ("quality", "quality: the demo model beside its dense original in f32", _QUALITY_COLUMNS),
    ("peers", "peers: another implementation and us, in turns", _PEER_COLUMNS),
)

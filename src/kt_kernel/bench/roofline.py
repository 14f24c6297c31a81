"""The roofline plot of a run: points under the roofs that were measured beside them."""

from pathlib import Path

from kt_kernel.bench.errors import BenchError

_MARKERS = {"bf16": "o", "int8": "s", "int4": "^", "int4g": "D"}


def plot(run: dict, path: Path) -> None:
    """Writes a PNG: x = operations per byte of weights touched, y = operations per second."""
    try:
        import matplotlib
    except ImportError:
        raise BenchError("--plot needs matplotlib: pip install 'kt-kernel[plot]'") from None
    points = [figure for figure in run["figures"] if figure["part"] == "kernels"]
    if not points:
        raise BenchError("--plot needs kernels to plot: use it with 'kt bench' or 'kt bench kernels'")
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    picture = Figure(figsize=(9, 6), layout="constrained")
    axes = picture.add_subplot(xscale="log", yscale="log")
    low, high = (f(point["intensity"] for point in points) for f in (min, max))
    _draw_roofs(axes, run["limits"], low / 2, high * 2)
    for name in sorted({(p["variant"], p["shape"], p["format"]) for p in points}):
        series = sorted(
            (p for p in points if (p["variant"], p["shape"], p["format"]) == name), key=lambda p: p["tokens"]
        )
        x, y = [p["intensity"] for p in series], [p["tflops"] * 1e12 for p in series]
        axes.plot(x, y, marker=_MARKERS.get(name[2], "o"), linewidth=0.8, label=" ".join(name))
        for p, at_x, at_y in zip(series, x, y, strict=True):
            axes.annotate(f"T={p['tokens']}", (at_x, at_y), fontsize=7, textcoords="offset points", xytext=(4, -8))
    axes.set_xlabel("operations per byte of expert weights touched")
    axes.set_ylabel("operations per second")
    axes.set_title(f"{run['machine']['cpu']}, {points[0]['threads']} threads")
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=150, format="png")


def _draw_roofs(axes, limits: dict, low: float, high: float) -> None:
    for variant, found in limits.items():
        read = found["read_gbps"] * 1e9
        for unit, peak in found["peaks"].items():
            ridge = peak / read
            xs = sorted({low, min(max(ridge, low), high), high})
            axes.plot(xs, [min(peak, read * x) for x in xs], color="gray", linewidth=1)
            axes.annotate(f"{variant} {unit}", (high, min(peak, read * high)), fontsize=7, ha="right", va="bottom")

"""From rounds of times to the figures that are printed and kept. Pure arithmetic."""

from statistics import median

from kt_kernel.bench.shapes import GGUF_TYPES, Shape

# What could do a format's arithmetic, best first; the first that the variant has is its peak. AVX2 has no unit for
# whole dot products of bytes: there integers are held against the FMA peak, and against bf16 at the same token count.
_FLOAT_UNITS = ("tile_bf16", "dot_bf16", "fma_f32")
_INTEGER_UNITS = ("tile_u8s8", "dot_u8s8", "fma_f32")


# Types of GGUF are multiplied as bf16 by tiles, and as bytes without.
_GGUF_UNITS = ("tile_bf16", "dot_u8s8", "fma_f32")


def peak_unit(weight_format: str, peaks: dict[str, float]) -> str | None:
    units = _FLOAT_UNITS
    if weight_format in {"int8", "int4", "int4g"}:
        units = _INTEGER_UNITS
    elif weight_format in GGUF_TYPES:
        units = _GGUF_UNITS
    return next((unit for unit in units if unit in peaks), None)


def kernel_figure(
    *,
    shape: Shape,
    weight_format: str,
    tokens: int,
    variant: str,
    threads: int,
    packed_bytes_per_expert: int,
    beyond_cache: bool,
    unit: str | None,
    point: dict,
) -> dict:
    """One point of ``kt bench kernels``.

    A share is the median over rounds of (this round's speed / what the limit gave in this round): on a machine with
    other tenants both move together, and only their ratio says something about the kernel.
    """
    call_bytes = point["unique_experts"] * packed_bytes_per_expert
    flops = shape.flops(tokens)
    rounds = [(median(r["us"]) / 1e6, r["read_gbps"] * 1e9, r.get("peak")) for r in point["rounds"]]
    us = [us for r in point["rounds"] for us in r["us"]]
    seconds = median(us) / 1e6
    figure = {
        "part": "kernels",
        **shape_fields(shape),
        "variant": variant,
        "format": weight_format,
        "tokens": tokens,
        "threads": threads,
        "us": round(seconds * 1e6, 2),
        "best_us": round(min(us), 2),
        "gbps": round(call_bytes / seconds / 1e9, 3),
        "tflops": round(flops / seconds / 1e12, 5),
        "intensity": round(flops / call_bytes, 4),
        "read_share": round(median(call_bytes / t / read for t, read, _ in rounds), 4),
        "peak_unit": unit,
        "peak_share": None,
        "roofline_share": None,
        "beyond_cache": beyond_cache,
    }
    if unit:
        figure["peak_share"] = round(median(flops / t / peak for t, _, peak in rounds), 4)
        for name in ("fed", "2x2"):
            if name in point["rounds"][0]:
                shares = (flops / t / r[name] for (t, *_), r in zip(rounds, point["rounds"], strict=True))
                figure[f"{name}_share"] = round(median(shares), 4)
        figure["roofline_share"] = round(median(max(call_bytes / r, flops / p) / t for t, r, p in rounds), 4)
    return figure


def add_rate_against_bf16(figures: list[dict]) -> None:
    """``vs_bf16``: the rate of each point over that of bf16 at the same shape, token count and variant in this run."""
    keys = ("part", "shape", "variant", "tokens", "threads")
    bf16 = {tuple(f[k] for k in keys): f["us"] for f in figures if f["format"] == "bf16"}
    for figure in figures:
        base = bf16.get(tuple(figure[k] for k in keys))
        figure["vs_bf16"] = round(base / figure["us"], 4) if base else None


def peer_figure(
    *,
    shape: Shape,
    weight_format: str,
    tokens: int,
    variant: str,
    error: float,
    peer_name: str,
    ours: dict,
    peer: dict,
) -> dict:
    """One point of ``kt bench peers``; ``ours`` and ``peer`` hold ``threads``, ``bytes`` of a call and ``us`` (all).

    A peer with several layouts of the weights also tells the ``layout`` that was faster.
    """
    flops = shape.flops(tokens)
    figure = {
        "part": "peers",
        **shape_fields(shape),
        "variant": variant,
        "format": weight_format,
        "tokens": tokens,
        "peer": peer_name,
        "error_between": round(error, 5),
    }
    if "layout" in peer:
        figure["peer_layout"] = peer["layout"]
    for name, side in (("", ours), ("peer_", peer)):
        us = median(side["us"])
        figure[f"{name}threads"] = side["threads"]
        figure[f"{name}us"] = round(us, 2)
        figure[f"{name}best_us"] = round(min(side["us"]), 2)
        figure[f"{name}gbps"] = round(side["bytes"] / us / 1e3, 3)
        figure[f"{name}tflops"] = round(flops / us / 1e6, 5)
    figure["speedup"] = round(figure["peer_us"] / figure["us"], 4)
    return figure


def shape_fields(shape: Shape) -> dict:
    return {
        "shape": shape.name,
        "experts": shape.experts,
        "top_k": shape.top_k,
        "hidden": shape.hidden,
        "intermediate": shape.intermediate,
    }

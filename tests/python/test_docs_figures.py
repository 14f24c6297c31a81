"""The figures of README.md are those of bench/results/."""

import json
import re
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench/results"
if not RESULTS.exists():
    pytest.skip("bench/results is not here: it is no part of source packages", allow_module_level=True)


def results(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def one(name: str, **wanted) -> dict:
    (found,) = (row for row in results(name)["figures"] if wanted.items() <= row.items())
    return found


def serve(**wanted) -> dict:
    return one("zen4-2core-avx512_bf16", part="serve", **wanted)


def avx2(tokens: int, **wanted) -> str:
    return times(one("zen4-2core-avx2", part="peers", tokens=tokens, **wanted)["speedup"])


def run_of(date: str) -> dict:
    (found,) = (run for run in results("hybrid-emerald-rapids-16vcpu-h200")["runs"] if run["date"].startswith(date))
    return found


def against_released(rows: list[dict], method: str, tokens: int) -> str:
    """Median times of both, where a point was measured more than once."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for row in rows:
        if (row["shape"], row["method"], row["tokens"]) == ("dsv3", method, tokens):
            found[row["who"] == "ours"].append(row["us"])
    return times(median(found[False]) / median(found[True]))


def released(method: str, tokens: int) -> str:
    return against_released(run_of("2026-11-16T16:03")["public_api_against_0.7.2"], method, tokens)


def q4_k(tokens: int) -> str:
    rows = run_of("2026-11-16T16:22")["llama_cpp"]
    (found,) = (row for row in rows if (row["shape"], row["format"], row["tokens"]) == ("dsv3", "q4_k", tokens))
    return times(found["speedup"])


def times(value: float) -> str:
    return f"{value:.0f}x" if value >= 10 else f"{value:.1f}x"


def shown() -> dict[str, str]:
    """What was measured -> the figure, of the table in README.md."""
    table = (ROOT / "README.md").read_text().partition("## Figures")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| [^|]*\| ([^|]+) \| ([^|]+) \|$", table, re.MULTILINE))


def measured() -> dict[str, str]:
    alone, many = (serve(model="demo", phase="decode", batch=batch) for batch in (1, 16))
    large = serve(model="qwen3-30b, 48 of 48 layers", phase="decode")
    small = {"shape": "8x2x3072x1536", "format": "fp8"}
    bf16, of_gguf = ({"shape": "dsv3", "format": name} for name in ("bf16", "q4_k"))
    return {
        "demo model, one request": f"{times(alone['vs_stock'])} transformers (bf16), "
        f"{times(alone['vs_llamacpp'])} llama.cpp (Q8_0)",
        "demo model, 16 requests": f"{times(many['vs_stock'])} transformers, {times(many['vs_llamacpp'])} llama.cpp",
        "Qwen3-30B-A3B shape, all 48 layers, int4g": f"{large['read_share']:.0%}".replace("%", " %")
        + " of the read bandwidth, end to end",
        "one layer, AVX2, bf16, against kt-kernel 0.7.2": f"{avx2(1, **bf16)} at T=1, {avx2(256, **bf16)} at T=256",
        "one layer, AVX2, FP8, against kt-kernel 0.7.2": f"{avx2(1, **small)} at T=1, {avx2(256, **small)} at T=256",
        "DeepSeek-V3 layer, AVX2, Q4_K, against llama.cpp": f"{avx2(1, **of_gguf)} at T=1, "
        f"{avx2(2048, **of_gguf)} at T=2048",
        "DeepSeek-V3 layer, int8, against kt-kernel 0.7.2": f"{released('AMXINT8', 1)} at T=1, "
        f"{released('AMXINT8', 2048)} at T=2048",
        "DeepSeek-V3 layer, FP8, against kt-kernel 0.7.2": f"{released('FP8', 1)} at T=1, "
        f"{released('FP8', 2048)} at T=2048",
        "DeepSeek-V3 layer, Q4_K, against llama.cpp": f"{q4_k(1)} at T=1, {q4_k(2048)} at T=2048",
    }


def test_readme_shows_what_was_measured():
    found = {what: figure for what, figure in shown().items() if what not in ("What", "---")}
    assert found == measured()


def shares() -> list[tuple[str, str, str, str]]:
    """Shape, format, and the shares of the limits as the table of AVX2 in docs/performance.md has them."""
    page = (ROOT / "docs/performance.md").read_text()
    return re.findall(r"^\| (\S+) \| (\w+) \| (\d+) %[^|]*\| ([\d /%-]+) \|$", page, re.MULTILINE)


@pytest.mark.parametrize(("shape", "weight_format", "read", "peaks"), shares())
def test_shares_are_those_that_were_measured(shape, weight_format, read, peaks):
    def point(tokens: int) -> dict:
        figures = results("zen4-2core-avx2")["figures"]
        wanted = {"part": "kernels", "shape": shape, "format": weight_format.lower(), "tokens": tokens}
        return next((row for row in figures if wanted.items() <= row.items()), {})

    assert abs(int(read) - 100 * point(1)["read_share"]) <= 0.6
    for tokens, shown in zip((512, 2048), re.findall(r"\d+|-", peaks), strict=True):
        if shown == "-":
            assert point(tokens) == {}
        else:
            assert abs(int(shown) - 100 * point(tokens)["peak_share"]) <= 0.6


def test_the_table_of_shares_is_found():
    assert len(shares()) >= 14


def test_the_speed_of_int4g_beside_int4():
    names = ("zen4-2core-avx2", "zen4-2core-avx512_bf16")
    rows = [row for name in names for row in results(name)["figures"] if row.get("peer") == "our int4"]
    found = [row["speedup"] for row in rows]
    said = f"reaches {min(found):.2f} to {max(found):.2f}x of its speed"
    assert said in (ROOT / "docs/convert.md").read_text()


def test_int4g_costs_at_most_half_of_what_int4_does():
    """On the demo model, with either kind of scales; docs/quality.md has the same perplexities."""
    found: dict[str, dict[str, dict]] = {}
    for row in results("zen4-2core-avx512_bf16")["figures"]:
        if row["part"] == "quality":
            found.setdefault(row["weights"], {})[row["method"]] = row
    page = (ROOT / "docs/quality.md").read_text()
    assert len(found) == 2
    for methods in found.values():
        assert methods["INT4G"]["change"] <= methods["AMXINT4"]["change"] / 2
        for row in methods.values():
            assert f"| {row['perplexity']:.3f} |" in page

import pytest

from kt_kernel.bench import figures, shapes

SHAPE = shapes.parse("8,2,64,32")


def kernel_figure(weight_format="bf16", us=(100.0, 200.0, 300.0), unit="fma_f32", **beside):
    rounds = [{"read_gbps": 1.0, "peak": 1e9, "us": [u], **beside} for u in us]
    return figures.kernel_figure(
        shape=SHAPE,
        weight_format=weight_format,
        tokens=4,
        variant="avx2",
        threads=2,
        packed_bytes_per_expert=10_000,
        beyond_cache=True,
        unit=unit,
        point={"unique_experts": 5.0, "rounds": rounds},
    )


def test_shares_are_taken_round_by_round():
    figure = kernel_figure()
    assert (figure["us"], figure["best_us"]) == (200.0, 100.0)
    assert figure["gbps"] == pytest.approx(0.25)
    assert figure["read_share"] == pytest.approx(0.25)
    flops = 6 * 64 * 32 * 2 * 4
    assert figure["peak_share"] == pytest.approx(flops / 200e-6 / 1e9, rel=1e-3)
    assert figure["roofline_share"] == pytest.approx(max(0.25, flops / 200e-6 / 1e9), rel=1e-3)
    assert figure["intensity"] == pytest.approx(flops / 50_000, rel=1e-3)


def test_shares_of_what_is_measured_beside_a_peak():
    figure = kernel_figure(unit="tile_bf16", **{"fed": 5e8, "2x2": 2.5e8})
    assert figure["fed_share"] == pytest.approx(2 * figure["peak_share"], rel=1e-3)
    assert figure["2x2_share"] == pytest.approx(4 * figure["peak_share"], rel=1e-3)
    assert "fed_share" not in kernel_figure()


def test_without_a_peak_there_is_no_share_of_it():
    figure = kernel_figure(unit=None)
    assert figure["peak_share"] is None
    assert figure["roofline_share"] is None


def test_rate_against_bf16():
    found = [kernel_figure(), kernel_figure("int4", us=(100.0,))]
    figures.add_rate_against_bf16(found)
    assert [figure["vs_bf16"] for figure in found] == [1.0, 2.0]
    alone = [kernel_figure("int4")]
    figures.add_rate_against_bf16(alone)
    assert alone[0]["vs_bf16"] is None


@pytest.mark.parametrize("weight_format", shapes.FORMATS)
def test_every_format_has_a_peak(weight_format):
    assert figures.peak_unit(weight_format, {"fma_f32": 1.0}) == "fma_f32"
    assert figures.peak_unit(weight_format, {}) is None


def test_speedup_is_the_ratio_of_medians():
    figure = figures.peer_figure(
        shape=SHAPE,
        weight_format="bf16",
        tokens=1,
        variant="avx2",
        error=0.001,
        peer_name="llama.cpp",
        ours={"threads": 2, "us": [10.0, 20.0, 90.0], "bytes": 1e6},
        peer={"threads": 1, "us": [50.0], "bytes": 1e6, "layout": "plain"},
    )
    assert (figure["peer"], figure["peer_layout"]) == ("llama.cpp", "plain")
    assert figure["speedup"] == 2.5
    assert figure["gbps"] == pytest.approx(50.0)
    assert figure["peer_threads"] == 1

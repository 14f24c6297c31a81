"""``kt bench hybrid``: one MoE layer between GPU tensors, through the public API."""

from dataclasses import asdict

from kt_kernel.bench import figures, kernels
from kt_kernel.bench.client import Client
from kt_kernel.bench.errors import BenchError
from kt_kernel.bench.progress import Progress
from kt_kernel.bench.run import Findings, Settings
from kt_kernel.methods import method_of

_ROUNDS = 5
_CHECKED_TOKENS = (1, 40)
# Against float32 with the weights as packed: what the kernels add by rounding activations.
_ERROR_LIMIT = {"int8": 0.03, "int4": 0.03, "int4g": 0.03}
_FLOAT_ERROR_LIMIT = 0.01


def measure_hybrid(settings: Settings, findings: Findings, progress: Progress) -> None:
    import torch

    if not torch.cuda.is_available():
        raise BenchError(
            "hybrid needs a GPU, and torch.cuda.is_available() is False; 'kt bench kernels' measures the CPU alone"
        )
    for variant in settings.variants:
        with Client("beside_gpu", variant=variant) as client:
            hello = client.call("hello")
            name, threads = hello["variant"], settings.threads or hello["default_threads"]
            gigabytes = kernels.probe_gigabytes()
            progress.say(f"limits of {name}")
            limits = client.call("limits", threads=threads, gigabytes=gigabytes, seconds=settings.seconds)
            findings.limits[name] = {"threads": threads, "gpu": hello["gpu"], **limits}
            for full in settings.shapes:
                for weight_format in settings.formats:
                    shape, _ = kernels.plan_layer(full, weight_format, findings)
                    progress.say(f"{name} {shape.name} {weight_format}: packing {shape.experts} experts")
                    opened = client.call(
                        "open_wrapper",
                        shape=asdict(shape),
                        method=method_of(weight_format),
                        threads=threads,
                        max_tokens=max(*settings.tokens, *_CHECKED_TOKENS),
                    )
                    error = client.call("error", tokens=_CHECKED_TOKENS)
                    if not error < _ERROR_LIMIT.get(weight_format, _FLOAT_ERROR_LIMIT):
                        findings.fail(f"{shape.name} {weight_format} on {name}: relative error {error:.4f}")
                    trip = client.call("round_trip", seconds=settings.seconds)
                    unit = figures.peak_unit(weight_format, limits["peaks"])
                    for tokens in settings.tokens:
                        progress.say(f"{name} {shape.name} {weight_format} T={tokens}")
                        point = client.call(
                            "hybrid_point",
                            tokens=tokens,
                            seconds=settings.seconds,
                            rounds=_ROUNDS,
                            gigabytes=gigabytes,
                            unit=unit,
                        )
                        figure = figures.kernel_figure(
                            shape=shape,
                            weight_format=weight_format,
                            tokens=tokens,
                            variant=name,
                            threads=opened["threads"],
                            packed_bytes_per_expert=opened["packed_bytes_per_expert"],
                            beyond_cache=False,
                            unit=unit,
                            point=point,
                        )
                        findings.figures.append(_hybrid_figure(figure, point, trip, error))
                        progress.done()


def _hybrid_figure(figure: dict, point: dict, trip: dict, error: float) -> dict:
    cpu, gpu, both = (point[f"overlap_{name}_us"] for name in ("cpu", "gpu", "both"))
    return {
        **{key: value for key, value in figure.items() if key != "beyond_cache"},
        "part": "hybrid",
        "error": round(error, 5),
        # 1: the shorter of the two is hidden behind the longer; 0: one after the other.
        "overlap": round((cpu + gpu - both) / min(cpu, gpu), 3),
        "graph_round_trip_us": round(trip["graph_us"], 2),
        "eager_round_trip_us": round(trip["eager_us"], 2),
        "empty_cpu_us": round(trip["cpu_us"], 2),
        "submit_sync_us": round(trip["graph_us"] - trip["cpu_us"], 2),
    }

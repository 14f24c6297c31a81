"""``kt bench limits`` and ``kt bench kernels``: this machine, and one MoE layer on it."""

from dataclasses import asdict

from kt_kernel.bench import figures, shapes
from kt_kernel.bench.client import Client
from kt_kernel.bench.progress import Progress
from kt_kernel.bench.run import Findings, Settings
from kt_kernel.machine import system

# Rounds of a point. Each brings its own limits, so more rounds follow a changing machine better.
_ROUNDS = 9


def probe_gigabytes() -> float:
    """Memory to read for the bandwidth: four times the last-level cache, half a gigabyte at least."""
    return max(0.5, 4 * system.l3_bytes() / 1e9)


def measure_limits(settings: Settings, findings: Findings, progress: Progress) -> None:
    for variant in settings.variants:
        with Client("ours", variant=variant) as client:
            hello = client.call("hello")
            progress.say(f"limits of {hello['variant']}")
            threads = settings.threads or hello["default_threads"]
            found = client.call("limits", threads=threads, gigabytes=probe_gigabytes(), seconds=settings.seconds)
            findings.limits[hello["variant"]] = {"threads": threads, **found}
            progress.done()


def measure_kernels(settings: Settings, findings: Findings, progress: Progress) -> None:
    found: list[dict] = []
    for variant in settings.variants:
        with Client("ours", variant=variant) as client:
            hello = client.call("hello")
            name, threads = hello["variant"], settings.threads or hello["default_threads"]
            units = findings.limits[name]["peaks"]
            for shape in settings.shapes:
                for weight_format in settings.formats:
                    found += _measure_layer(
                        client, settings, findings, progress, name, threads, units, shape, weight_format
                    )
    figures.add_rate_against_bf16(found)
    findings.figures += found


def _measure_layer(
    client: Client,
    settings: Settings,
    findings: Findings,
    progress: Progress,
    variant: str,
    threads: int,
    units: dict[str, float],
    full: shapes.Shape,
    weight_format: str,
) -> list[dict]:
    shape, copies = plan_layer(full, weight_format, findings)
    progress.say(f"{variant} {shape.name} {weight_format}: packing {shape.experts} experts")
    arguments = {
        "weight_format": weight_format,
        "threads": threads,
        "max_tokens": max(settings.tokens),
        "copies": copies,
    }
    opened = client.call("open", shape=asdict(shape), seeded=False, **arguments)
    packed = opened["packed_bytes_per_expert"]
    beyond_cache = copies * shape.experts * packed >= 4 * system.l3_bytes()
    if not beyond_cache:
        findings.note(
            f"{shape.name}: weights below 4 times the L3 (beyond_cache in --json): too much of the read share"
        )
    unit = figures.peak_unit(weight_format, units)
    found = []
    for tokens in settings.tokens:
        progress.say(f"{variant} {shape.name} {weight_format} T={tokens}")
        point = client.call(
            "point", tokens=tokens, seconds=settings.seconds, rounds=_ROUNDS, gigabytes=probe_gigabytes(), unit=unit
        )
        found.append(
            figures.kernel_figure(
                shape=shape,
                weight_format=weight_format,
                tokens=tokens,
                variant=variant,
                threads=threads,
                packed_bytes_per_expert=packed,
                beyond_cache=beyond_cache,
                unit=unit,
                point=point,
            )
        )
        progress.done()
    client.call("close")
    return found


def plan_layer(
    full: shapes.Shape, weight_format: str, findings: Findings, extra_bytes_per_expert: int = 0
) -> tuple[shapes.Shape, int]:
    """The shape that fits into memory, and how many copies of it go round; says so when experts are left out."""
    available = system.available_bytes()
    packed = shapes.planned_bytes(full, weight_format)
    shape = shapes.fit(full, packed + extra_bytes_per_expert, available)
    if shape.experts < full.experts:
        findings.note(f"{full.name} {weight_format}: memory for {shape.experts} of {full.experts} experts")
    left = available - 2 * shape.experts * extra_bytes_per_expert
    return shape, shapes.layers_beyond_cache(shape, packed, system.l3_bytes(), left)

"""One MoE layer beside a GPU: tokens start and end there, the experts run on the CPU while the GPU works on.

For every variant, shape, format and token count: the result is checked against a float32 computation of the same
(decoded) weights on the GPU, then the CPU part is timed from GPU tensor to GPU tensor while the GPU multiplies
matrices on another stream. Limits of the CPU are measured in the same process, before the points.

    python bench/hybrid.py --out figures.json --variants amx,avx512_bf16 --shapes dsv3,qwen3-30b

Needs torch with CUDA. Each variant runs in its own process, because the choice is made at import.
"""

import argparse
import json
import os
import subprocess
import sys
import time

UNITS = ("fma_f32", "dot_bf16", "dot_u8s8", "tile_bf16", "tile_u8s8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--variants", default="")
    parser.add_argument("--shapes", default="dsv3,qwen3-30b")
    parser.add_argument("--formats", default="bf16,int8,int4,int4g")
    parser.add_argument("--tokens", default="1,16,256,2048")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--check", default="1,40", help="token counts whose result is held against the reference")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def reference(layer, x, ids, weights):
    """The same function in float32 on the GPU, expert by expert."""
    import torch

    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        gate, up, down = (torch.from_numpy(m).cuda() for m in layer.decode_expert(expert))
        for token, slot in (ids == expert).nonzero().tolist():
            row = x[token].float()
            hidden = torch.nn.functional.silu(gate @ row) * (up @ row)
            out[token] += weights[token, slot] * (down @ hidden)
    return out


class Point:
    """GPU and pinned tensors of one token count, and a GPU workload that runs beside the CPU's."""

    def __init__(self, shape, tokens: int):
        import torch

        e, k, h = shape.experts, shape.top_k, shape.hidden
        generator = torch.Generator(device="cuda").manual_seed(tokens)
        self.x = torch.randn(tokens, h, device="cuda", dtype=torch.bfloat16, generator=generator)
        routes = [torch.rand(tokens, e, device="cuda", generator=generator).argsort(-1)[:, :k] for _ in range(8)]
        self.ids = [r.contiguous().cpu().pin_memory() for r in routes]
        self.weights = torch.rand(tokens, k).pin_memory()
        self.host_x = torch.empty(tokens, h, dtype=torch.bfloat16).pin_memory()
        self.host_y = torch.empty_like(self.host_x).pin_memory()
        self.y = torch.empty_like(self.x)
        self.hot = torch.randn(h, h, device="cuda", dtype=torch.bfloat16)
        self.stream = torch.cuda.Stream()

    def run(self, layer, call: int) -> None:
        import torch

        with torch.cuda.stream(self.stream):
            torch.mm(self.x, self.hot)
        self.host_x.copy_(self.x, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        ids = self.ids[call % len(self.ids)]
        layer.forward(
            len(self.x), ids.data_ptr(), self.weights.data_ptr(), self.host_x.data_ptr(), self.host_y.data_ptr()
        )
        self.y.copy_(self.host_y, non_blocking=True)
        torch.cuda.synchronize()

    def error(self, layer) -> float:
        self.run(layer, 0)
        expected = reference(layer, self.x, self.ids[0].cuda(), self.weights.cuda())
        return ((self.y.float() - expected).norm() / expected.norm()).item()


def times(point: Point, layer, seconds: float) -> list[float]:
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < 7 or time.perf_counter() < end:
        start = time.perf_counter()
        point.run(layer, len(samples))
        samples.append(time.perf_counter() - start)
    return sorted(samples[2:])


def measure(args: argparse.Namespace) -> None:
    import torch

    from kt_kernel import __cpu_variant__, _core
    from kt_kernel.bench.layer import open_pool
    from kt_kernel.bench.shapes import SHAPES

    pool = open_pool(args.threads or None)
    read = _core.measure_read_bandwidth(pool, 4.0, 1.0)
    peaks = {unit: _core.measure_peak(pool, unit, 0.3) for unit in UNITS}
    facts = {"variant": __cpu_variant__, "threads": pool.threads, "gpu": torch.cuda.get_device_name()}
    emit({**facts, "limits": {"read_GBps": read, **{unit: peak for unit, peak in peaks.items() if peak}}})
    for name in args.shapes.split(","):
        shape = SHAPES[name]
        for weight_format in args.formats.split(","):
            layer = _core.MoELayer(
                pool,
                format=weight_format,
                num_experts=shape.experts,
                top_k=shape.top_k,
                hidden_size=shape.hidden,
                intermediate_size=shape.intermediate,
                max_tokens=max(map(int, args.tokens.split(","))),
            )
            layer.fill_random(1)
            checked = {n: round(Point(shape, n).error(layer), 5) for n in map(int, filter(None, args.check.split(",")))}
            for tokens in map(int, args.tokens.split(",")):
                point = Point(shape, tokens)
                samples = times(point, layer, args.seconds)
                median = samples[len(samples) // 2]
                active = sum(len(ids.unique()) for ids in point.ids) / len(point.ids)
                flop = 6 * shape.hidden * shape.intermediate * shape.top_k * tokens
                bandwidth = active * layer.packed_bytes_per_expert / median / 1e9
                emit(
                    {
                        **facts,
                        "shape": name,
                        "format": weight_format,
                        "tokens": tokens,
                        "us": round(median * 1e6, 1),
                        "best_us": round(samples[0] * 1e6, 1),
                        "GBps": round(bandwidth, 1),
                        "TFLOPS": round(flop / median / 1e12, 3),
                        "of_read": round(bandwidth / read, 3),
                        "of_peak": {u: round(flop / median / p, 3) for u, p in peaks.items() if p},
                        "error": checked,
                    }
                )
            del layer


def emit(row: dict) -> None:
    print(json.dumps(row), flush=True)


def main() -> int:
    args = arguments()
    if args.worker:
        measure(args)
        return 0
    rows = []
    for variant in args.variants.split(","):
        environment = {**os.environ, **({"KT_KERNEL_CPU_VARIANT": variant} if variant else {})}
        command = [sys.executable, __file__, *sys.argv[1:], "--worker"]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                print(line, end="", flush=True)
                rows.append(json.loads(line))
        if process.returncode:
            print(f"variant {variant or 'default'} failed with exit code {process.returncode}", file=sys.stderr)
            return 1
        with open(args.out, "w") as file:
            json.dump(rows, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())

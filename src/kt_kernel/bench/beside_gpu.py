"""The hybrid side of a measurement, inside its own process: tokens on the GPU, experts on the CPU."""

from statistics import median

import torch

from kt_kernel import KTMoEWrapper, _core
from kt_kernel.bench.layer import default_threads, measure_peaks
from kt_kernel.bench.ours import PROBE_SECONDS, Ours
from kt_kernel.bench.shapes import Shape
from kt_kernel.bench.timing import sample

_LAYERS_IN_GRAPH = 32
_WARM_UP_SECONDS = 0.01  # one call at least
# Square matrices whose product on the GPU stands for the hot experts, and for attention.
_GPU_WORK_SIZE = 4096


class BesideGpu(Ours):
    """Answers the requests of ``client``; every public method is one."""

    def __init__(self) -> None:
        super().__init__()
        self._wrapper: KTMoEWrapper | None = None
        self._shape: Shape | None = None
        self._work = torch.randn(_GPU_WORK_SIZE, _GPU_WORK_SIZE, device="cuda", dtype=torch.bfloat16)

    def hello(self) -> dict:
        return {**super().hello(), "gpu": torch.cuda.get_device_name()}

    def open_wrapper(self, shape: dict, method: str, threads: int, max_tokens: int) -> dict:
        self._wrapper = None
        self._shape = Shape(**shape)
        self._wrapper = KTMoEWrapper(
            layer_idx=0,
            num_experts=self._shape.experts,
            num_experts_per_tok=self._shape.top_k,
            hidden_size=self._shape.hidden,
            moe_intermediate_size=self._shape.intermediate,
            cpuinfer_threads=threads,
            weight_path=f"/random/{method}",
            chunked_prefill_size=max_tokens,
            method=method,
        )
        self._wrapper.load_random_weights(1)
        if self._pool is not self._wrapper.moe.pool:
            # Probes between calls run on the same workers: those of another pool would still spin on their CPUs.
            self._pool, self._probe = self._wrapper.moe.pool, None
        return {
            "packed_bytes_per_expert": self._wrapper.moe.packed_bytes_per_expert,
            "threads": self._wrapper.moe.pool.threads,
        }

    def hybrid_point(self, tokens: int, seconds: float, rounds: int, gigabytes: float, unit: str | None) -> dict:
        """Rounds of calls from GPU tensor to GPU tensor, each beside what memory and arithmetic give at that moment;
        then the same calls with the GPU at work between submit and sync."""
        if self._probe is None:
            self._probe = _core.ReadProbe(self._pool, gigabytes)
        calls = _Calls(self._wrapper, self._shape, tokens)
        answer: dict = {"unique_experts": calls.unique_experts, "rounds": []}
        sample(calls.run, _WARM_UP_SECONDS)
        made = 0
        for _ in range(rounds):
            read_gbps = self._probe.measure(PROBE_SECONDS)
            peaks = self._whole_machine_peaks(unit)
            us = sample(calls.run, seconds / rounds, made)
            made += len(us)
            answer["rounds"].append({"read_gbps": read_gbps, **peaks, "us": us})
        return {**answer, **self._overlap(calls, seconds)}

    def _whole_machine_peaks(self, unit: str | None) -> dict[str, float]:
        """As if the CPU that is left to the thread that drives the GPU worked too."""
        more = default_threads() / self._pool.threads
        return {name: more * peak for name, peak in measure_peaks(self._pool, unit, PROBE_SECONDS).items()}

    def error(self, tokens: list[int]) -> float:
        """The largest of these token counts: relative, of one call, against float32 on the GPU with the weights as the
        kernels see them. Every token takes the same experts: few to decode, and many rows for each."""
        experts = [
            tuple(torch.from_numpy(matrix).cuda() for matrix in self._wrapper.moe.decode_expert(expert))
            for expert in range(self._shape.top_k)
        ]
        return max(_Calls(self._wrapper, self._shape, count, len(experts)).error(experts) for count in tokens)

    def round_trip(self, seconds: float) -> dict:
        """What a layer costs beside its CPU work: one token, every expert masked, so that the CPU adds up nothing."""
        wrapper, calls = self._wrapper, _Calls(self._wrapper, self._shape, 1)
        wrapper.gpu_experts_mask.fill_(True)
        try:
            calls.run(0)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(_LAYERS_IN_GRAPH):
                    calls.enqueue(0)

            def replay(_: int) -> None:
                graph.replay()
                torch.cuda.synchronize()

            def eager(_: int) -> None:
                for _ in range(_LAYERS_IN_GRAPH):
                    calls.enqueue(0)
                torch.cuda.synchronize()

            replay(0)
            return {
                "graph_us": median(sample(replay, seconds)) / _LAYERS_IN_GRAPH,
                "eager_us": median(sample(eager, seconds)) / _LAYERS_IN_GRAPH,
                "cpu_us": median(sample(calls.on_cpu(), seconds)),
            }
        finally:
            torch.cuda.synchronize()
            wrapper.gpu_experts_mask.fill_(False)

    def _overlap(self, calls: "_Calls", seconds: float) -> dict:
        cpu = median(sample(calls.run, seconds / 3))
        product = self._gpu_us(1)
        repeats = max(1, round(cpu / product))
        gpu = self._gpu_us(repeats)
        both = median(sample(lambda call: calls.run(call, lambda: self._gpu_work(repeats)), seconds / 3))
        return {"overlap_cpu_us": cpu, "overlap_gpu_us": gpu, "overlap_both_us": both}

    def _gpu_work(self, repeats: int) -> None:
        for _ in range(repeats):
            torch.mm(self._work, self._work)

    def _gpu_us(self, repeats: int) -> float:
        def run(_: int) -> None:
            self._gpu_work(repeats)
            torch.cuda.synchronize()

        run(0)
        return median(sample(run, 0.05))


class _Calls:
    """Tokens on the GPU and several routings to go round, to all experts or to the first ones."""

    def __init__(self, wrapper: KTMoEWrapper, shape: Shape, tokens: int, experts: int | None = None):
        generator = torch.Generator(device="cuda").manual_seed(tokens)
        self._wrapper = wrapper
        self._x = torch.randn(tokens, shape.hidden, device="cuda", dtype=torch.bfloat16, generator=generator)
        self._ids = [
            torch.rand(tokens, experts or shape.experts, device="cuda", generator=generator)
            .argsort(-1)[:, : shape.top_k]
            .int()
            for _ in range(16 if tokens <= 16 else 4)
        ]
        self._weights = torch.full((tokens, shape.top_k), 1 / shape.top_k, device="cuda")
        self.unique_experts = sum(len(ids.unique()) for ids in self._ids) / len(self._ids)

    def enqueue(self, call: int, between=None) -> torch.Tensor:
        stream = torch.cuda.current_stream().cuda_stream
        self._wrapper.submit_forward(self._x, self._ids[call % len(self._ids)], self._weights, stream)
        if between:
            between()
        return self._wrapper.sync_forward(self._x, stream)

    def run(self, call: int, between=None) -> torch.Tensor:
        result = self.enqueue(call, between)
        torch.cuda.synchronize()
        return result

    def on_cpu(self):
        """The same call on host memory, without a queue."""
        x, ids, weights = self._x.cpu(), self._ids[0].cpu(), self._weights.cpu()
        out = torch.empty_like(x)
        addresses = (ids.data_ptr(), weights.data_ptr(), x.data_ptr(), out.data_ptr())
        layer = self._wrapper.moe

        def run(_: int, keep=(x, ids, weights, out)) -> None:
            layer.forward(len(x), *addresses, id_bytes=4)

        return run

    def error(self, experts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> float:
        result = self.run(0).float()
        ids, expected = self._ids[0], torch.zeros_like(result)
        for expert, (gate, up, down) in enumerate(experts):
            rows, slots = (ids == expert).nonzero(as_tuple=True)
            x = self._x[rows].float()
            outputs = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
            expected.index_add_(0, rows, outputs * self._weights[rows, slots, None])
        return ((result - expected).norm() / expected.norm()).item()

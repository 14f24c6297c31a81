"""What is run: each row is an engine with a kt_kernel, a model and arguments, and what is asked of it."""

from dataclasses import dataclass, field

# Where a row runs; a run is told where these live (``run.py --places``).
STOCK = "stock"  # SGLang as released, and this kt_kernel without its plugin: the engine's own --kt options
PLUGIN = "plugin"  # the same with the plugin of kt_kernel.integrations.sglang, as `pip install` brings it
FORK = "fork"  # sglang-kt 0.7.2, and this kt_kernel
ORIGINAL = "original"  # sglang-kt 0.7.2, and kt-kernel 0.7.2

TINY, INT4, LARGE = "tiny", "tiny-int4", "qwen3-30b-8layers"
GPU_EXPERTS = {TINY: 4, INT4: 4, LARGE: 32}  # a quarter
# Of the large model what was best for kt-kernel 0.7.2 on 16 CPUs.
THREADS = {TINY: 8, INT4: 8, LARGE: 14}
PREFILL_TOKENS = 2048

COMMON = {
    "dtype": "bfloat16",
    "random_seed": 1,
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "mem_fraction_static": 0.3,
    "max_running_requests": 16,
    "chunked_prefill_size": PREFILL_TOKENS,
    "max_total_tokens": 16384,
    "disable_radix_cache": True,
    "skip_server_warmup": True,
    "mm_feature_transport": "cpu",
    "log_level": "warning",
}
ON_GPU = {"attention_backend": "triton", "cuda_graph_bs_decode": [1, 2, 4, 8], "disable_prefill_cuda_graph": True}
ON_CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "chunked_prefill_size": 512,
    "max_total_tokens": 4096,
}


@dataclass(frozen=True)
class Figure:
    call: str
    arguments: dict
    unit: str
    more_is_better: bool = True
    rounds: int = 5
    warm_up: bool = True  # one round more, before them

    @property
    def name(self) -> str:
        return " ".join([self.call, *(f"{name} {value}" for name, value in self.arguments.items())])


def _decode(tokens: dict[int, int], rounds: int = 5) -> tuple[Figure, ...]:
    """Batch -> new tokens of each sequence: about a second on an H200."""
    return tuple(
        Figure("decode", {"batch": batch, "tokens": count}, "tokens/s", rounds=rounds)
        for batch, count in tokens.items()
    )


# A second of the tiny model differs by a third from the next one; medians of 5 differed by a quarter.
DECODE = _decode({1: 512, 8: 512}, rounds=21)
PREFILL = Figure("prefill", {"tokens": PREFILL_TOKENS}, "s", more_is_better=False)
IDLE = Figure("idle", {"batch": 1, "tokens": 32}, "share", more_is_better=False, rounds=1, warm_up=False)
LARGE_FIGURES = (PREFILL, IDLE, *_decode({1: 96, 8: 48}))


@dataclass(frozen=True)
class Row:
    name: str
    place: str = STOCK
    model: str = TINY
    method: str | None = "BF16"  # None: without kt_kernel
    options: dict = field(default_factory=dict)  # of the engine; None takes one away
    variables: dict = field(default_factory=dict)
    figures: tuple[Figure, ...] = ()
    baseline: str | None = None  # the row that figures are held against
    right: bool | None = True  # tokens are those of the reference; None: by design not, False: must be noticed
    together: bool = False
    recorded: bool = False  # which experts are on the GPU in each pass: as many as asked for, and they move
    ends: str | None = None  # a server that is ended by this signal

    def engine_options(self, model_path: str, weights: str, device: str) -> dict:
        options = {"model_path": model_path, **COMMON, **(ON_GPU if device == "cuda" else ON_CPU)}
        if self.method is not None:
            options |= {
                "kt_weight_path": weights,
                "kt_method": self.method,
                "kt_cpuinfer": THREADS[self.model],
                "kt_threadpool_count": 1,
                "kt_num_gpu_experts": GPU_EXPERTS[self.model],
            }
        return {name: value for name, value in {**options, **self.options}.items() if value is not None}


_STREAMED = {"kt_gpu_prefill_token_threshold": 8}
_LONG = {"kt_gpu_prefill_token_threshold": PREFILL_TOKENS // 2}
_DYNAMIC = {"kt_enable_dynamic_expert_update": True}
_RECORDED = {
    "record_kt_gpu_expert_distribution": True,
    "expert_distribution_recorder_mode": "stat",
    "kt_expert_placement_strategy": "random",
}
# SGLang's kernels for 4 bits that are not compiled there: those of Marlin take over five minutes.
_TRITON = {"moe_runner_backend": "triton"}
_EAGER = {"disable_cuda_graph": True, "cuda_graph_bs_decode": None}
# What bench/sglang/fault leaves out: an expert of the CPU, in every layer.
_DROP = {"KT_FAULT_DROP_EXPERT": "9"}

ROWS = (
    Row("plain", method=None, figures=DECODE, together=True),
    Row("eager", options=_EAGER),
    Row("graphs", figures=DECODE, baseline="original", together=True),
    Row("prefill graphs", options={"disable_prefill_cuda_graph": None}),
    Row("no expert on the GPU", options={"kt_num_gpu_experts": 0}),
    Row("deferred", options={"kt_max_deferred_experts_per_token": 2}, right=None),
    Row("int8", method="AMXINT8"),
    Row("dropped expert", variables=_DROP, right=False),
    Row("server, terminated", ends="SIGTERM"),
    Row("server, killed", ends="SIGKILL"),
    Row("plugin", PLUGIN, figures=DECODE, baseline="original", together=True),
    Row("plugin, prefill on the GPU", PLUGIN, options=_STREAMED | _DYNAMIC, together=True),
    Row("plugin, recorded", PLUGIN, options=_STREAMED | _DYNAMIC | _RECORDED, recorded=True),
    Row("int4 plain", STOCK, INT4, None, options=_TRITON),
    Row("int4", PLUGIN, INT4, "RAWINT4", options=_TRITON, together=True),
    Row("int4, prefill on the GPU", PLUGIN, INT4, "RAWINT4", _TRITON | _STREAMED | _DYNAMIC, together=True),
    Row("fork", FORK, figures=DECODE, baseline="original", together=True),
    Row("original", ORIGINAL, figures=DECODE),
    Row("large", STOCK, LARGE, figures=LARGE_FIGURES, baseline="original large", right=None),
    Row(
        "plugin large",
        PLUGIN,
        LARGE,
        options=_LONG,
        figures=LARGE_FIGURES,
        baseline="original large, prefill on the GPU",
        right=None,
    ),
    Row("fork large", FORK, LARGE, figures=LARGE_FIGURES, baseline="original large", right=None),
    Row("original large", ORIGINAL, LARGE, figures=LARGE_FIGURES, right=None),
    Row("original large, prefill on the GPU", ORIGINAL, LARGE, options=_LONG, figures=LARGE_FIGURES, right=None),
    Row("large int8", STOCK, LARGE, "AMXINT8", figures=LARGE_FIGURES, baseline="original large int8", right=None),
    Row("original large int8", ORIGINAL, LARGE, "AMXINT8", figures=LARGE_FIGURES, right=None),
)
CALLS = sorted({figure.call for row in ROWS for figure in row.figures})

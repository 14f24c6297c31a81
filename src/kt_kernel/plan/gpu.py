"""A model whose experts are on the CPU and whose rest is on GPUs, under SGLang: what fits there, and how fast it is.

GPUs are not measured: a table has what their makers say, of which a share is taken. In a layer the attention comes
first; then the GPU computes shared experts and its own routed ones while the CPU computes the others:
    layer = attention + max(experts on the CPU + hand-over, experts on the GPU + shared experts) + launches
SGLang's Python runs beside it, a step ahead, and is what a small model waits for.
"""

from dataclasses import dataclass

from kt_kernel.machine.gpus import Gpu
from kt_kernel.machine.probe import Probe
from kt_kernel.plan import sizes
from kt_kernel.plan.predict import Prediction, active_experts
from kt_kernel.registry.known import Facts

# (part of the name, memory GB/s, dense bf16 TFLOPS); the first that fits.
_SPECS = (
    ("B300", 8000, 2250),
    ("B200", 8000, 2250),
    ("H200", 4800, 990),
    ("H100 PCIe", 2000, 756),
    ("H100", 3350, 990),
    ("H20", 4000, 148),
    ("A100-SXM4-80GB", 2039, 312),
    ("A100 80GB", 1935, 312),
    ("A100", 1555, 312),
    ("PRO 6000", 1792, 250),
    ("6000 Ada", 960, 182),
    ("L40S", 864, 362),
    ("L40", 864, 181),
    ("L20", 864, 120),
    ("L4", 300, 121),
    ("5090", 1792, 209),
    ("5080", 960, 113),
    ("5070", 896, 88),
    ("4090", 1008, 165),
    ("4080", 717, 98),
    ("4070", 504, 58),
    ("3090", 936, 71),
    ("3080", 760, 60),
    ("A6000", 768, 155),
    ("A5000", 768, 111),
    ("A40", 696, 150),
    ("A10", 600, 125),
    ("V100", 900, 112),
    ("T4", 320, 65),
)
_UNKNOWN = (400, 50)
_READ_SHARE, _PRODUCT_SHARE = 0.8, 0.5  # of what makers say
_LAUNCH_S = 30e-6  # kernels of a layer inside a CUDA graph
_HANDOVER_S = 20e-6  # a layer's input and output across the bus: 7 to 20 us, measured on an H200 with 1 to 15 threads
# SGLang 0.5.17 on 16 CPUs beside an H200, a model of 4 thin layers: 550 to 810 tokens/s of one request, and 15 to 25 ms
# to the first token of a short prompt, whatever computes the experts.
_HOST_STEP_S, _HOST_PROMPT_S = 1.5e-3, 15e-3
RESERVE_BYTES = 3_000_000_000  # of each GPU: CUDA's context, graphs, activations


@dataclass(frozen=True)
class GpuPlan:
    """Of one GPU of `count`, which share every matrix."""

    count: int
    gpu_experts: int  # of each layer
    tokens: int  # of all requests together, whose keys are there
    needed_bytes: int
    free_bytes: int

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.free_bytes


def specification(gpu: Gpu) -> tuple[float, float]:
    """(bytes per second, operations per second) that can be counted on."""
    gbps, tflops = next((spec[1:] for spec in _SPECS if spec[0] in gpu.name), _UNKNOWN)
    return gbps * 1e9 * _READ_SHARE, tflops * 1e12 * _PRODUCT_SHARE


def is_known(gpu: Gpu) -> bool:
    return any(spec[0] in gpu.name for spec in _SPECS)


def gpu_plan(facts: Facts, gpus: tuple[Gpu, ...], tokens: int, gpu_experts: int | None) -> GpuPlan:
    """`tokens` of all requests together have their keys there. None: as many experts as then fit, evenly by layer."""
    count = len(gpus)
    free = min(gpu.free_bytes for gpu in gpus)
    rest = sizes.layer_weights(facts) * sizes.bytes_per_weight(facts.rest) + 2 * 2 * sizes.head_weights(facts)
    kv = tokens * sizes.kv_token_bytes(facts)
    # Latent keys belong to all heads: every GPU has them.
    fixed = rest / count + (kv if facts.mla else kv / min(count, facts.kv_heads)) + RESERVE_BYTES
    expert = 3 * facts.hidden * facts.moe_intermediate * sizes.bytes_per_weight(facts.encoding)
    one_of_each_layer = facts.moe_layers * expert / count
    if gpu_experts is None:
        gpu_experts = max(0, min(facts.experts, int((free - fixed) / one_of_each_layer)))
    return GpuPlan(count, gpu_experts, tokens, int(fixed + gpu_experts * one_of_each_layer), free)


def predict_split_decode(
    probe: Probe, facts: Facts, weight_format: str, gpus: tuple[Gpu, ...], gpu_experts: int, context: int
) -> Prediction:
    read = specification(gpus[0])[0] * len(gpus)
    rest = sizes.bytes_per_weight(facts.rest)
    expert = 3 * facts.hidden * facts.moe_intermediate
    on_gpu = gpu_experts / facts.experts
    products = probe.products(weight_format, facts.hidden, facts.moe_intermediate)
    cpu = products.seconds(1, facts.top_k * (1 - on_gpu) * expert) + _HANDOVER_S if on_gpu < 1 else 0.0
    theirs = facts.top_k * on_gpu * expert * sizes.bytes_per_weight(facts.encoding)
    gpu = (theirs + sizes.shared_weights(facts) * rest) / read
    beside = sizes.layer_weights(facts) - facts.moe_layers * sizes.shared_weights(facts)
    parts = {
        "experts": facts.moe_layers * max(cpu, gpu),
        "linears": (beside * rest + 2 * sizes.head_weights(facts)) / read,
        "launches": facts.layers * _LAUNCH_S,
        "attention": context * sizes.kv_token_bytes(facts) / read,
    }
    return Prediction(1, _beside_host(parts, _HOST_STEP_S))


def predict_split_prefill(
    probe: Probe, facts: Facts, weight_format: str, gpus: tuple[Gpu, ...], gpu_experts: int, tokens: int
) -> Prediction:
    """Experts of the CPU are computed there; SGLang's layerwise prefill, which brings them to the GPU, is left out."""
    operations = specification(gpus[0])[1] * len(gpus)
    expert = 3 * facts.hidden * facts.moe_intermediate
    on_gpu = gpu_experts / facts.experts
    active = active_experts(facts, tokens) * (1 - on_gpu)
    products = probe.products(weight_format, facts.hidden, facts.moe_intermediate)
    rows = tokens * facts.top_k / max(active_experts(facts, tokens), 1)
    cpu = products.seconds(rows, active * expert) + _HANDOVER_S if active else 0.0
    gpu = 2 * tokens * (facts.top_k * on_gpu * expert + sizes.shared_weights(facts)) / operations
    beside = sizes.layer_weights(facts) - facts.moe_layers * sizes.shared_weights(facts)
    pairs = tokens * tokens * facts.heads * facts.head_dim
    parts = {
        "experts": facts.moe_layers * max(cpu, gpu),
        "linears": 2 * tokens * beside / operations,
        "launches": facts.layers * _LAUNCH_S,
        "attention": sizes.kv_layers(facts) * 2 * pairs / operations,
    }
    return Prediction(tokens, _beside_host(parts, _HOST_PROMPT_S))


def _beside_host(parts: dict[str, float], host_s: float) -> dict[str, float]:
    """What is left of the host's time when the GPU has done its part."""
    return {**parts, "scheduling": max(0.0, host_s - sum(parts.values()))}

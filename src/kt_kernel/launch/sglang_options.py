"""What SGLang is started with, each option with its reason."""

from dataclasses import dataclass
from pathlib import Path

from kt_kernel.cli.language import t
from kt_kernel.launch.preferences import OPTION, Preferences
from kt_kernel.machine.facts import Machine
from kt_kernel.plan.choices import Choice
from kt_kernel.plan.plan import Chosen

# Names of settings, and what SGLang calls them where that is something else.
_NAMES = {
    "kt_gpu_prefill_token_threshold": "kt-gpu-prefill-token-threshold",
    "attention_backend": "attention-backend",
    "mem_fraction_static": "mem-fraction-static",
    "chunked_prefill_size": "chunked-prefill-size",
    "max_running_requests": "max-running-requests",
    "max_total_tokens": "max-total-tokens",
    "watchdog_timeout": "watchdog-timeout",
    "tensor_parallel_size": "tensor-parallel-size",
    "served_model_name": "served-model-name",
    "disable_shared_experts_fusion": "disable-shared-experts-fusion",
    "fp8_gemm_backend": "fp8-gemm-backend",
}
_HANDLED = frozenset(_NAMES)
_PREFILL_THRESHOLD, _CHUNK, _REQUESTS, _WATCHDOG_S = 4096, 4096, 32, 3000
_MOST_OF_GPU, _GPU_RESERVE = 0.9, 2_000_000_000


@dataclass(frozen=True)
class Server:
    """Where it listens, and what it serves."""

    host: str
    port: int
    model: Path
    weights: Path | None = None  # converted experts; None: of the model itself
    trust_remote_code: bool = False
    api_key: str | None = None
    named_nodes: bool = False  # NUMA nodes were asked for by their numbers


class OptionList:
    def __init__(self, preferences: Preferences):
        self._preferences = preferences
        self.found: list[Choice] = []

    def add(self, name: str, value: object, reason: str) -> None:
        self.found.append(Choice(name, value, reason))

    def prefer(self, setting: str, value: object = None, reason: str = "") -> None:
        """What somebody set, else `value`; without one SGLang decides, and the option is left out."""
        said = self._preferences.get(setting)
        if said.value is not None:
            self.add(_NAMES[setting], said.value, reason_of(said.source))
        elif value is not None:
            self.add(_NAMES[setting], value, reason)


def reason_of(source: str | None) -> str:
    return t("asked for") if source == OPTION else t("set in {source}", source=source)


def sglang_options(
    server: Server, chosen: Chosen | None, machine: Machine, preferences: Preferences, tensor_parallel: Choice
) -> list[Choice]:
    """`chosen`: of a model with experts. SGLang alone computes another one, and one whose experts the GPU holds."""
    options = OptionList(preferences)
    options.add("host", server.host, t("where it listens"))
    options.add("port", server.port, t("where it listens"))
    options.add("model", server.model, t("the model"))
    if chosen is not None and not chosen.all_on_gpu:
        _add_experts(options, server, chosen)
    options.prefer("attention_backend")
    if server.trust_remote_code:
        options.add("trust-remote-code", True, t("the model's own Python code may run"))
    options.prefer("mem_fraction_static", *_memory_fraction(machine))
    options.prefer("chunked_prefill_size", _CHUNK, t("pieces of long prompts"))
    options.prefer("max_running_requests", _REQUESTS, t("more wait"))
    if chosen is None or chosen.all_on_gpu:
        options.prefer("max_total_tokens")
    else:
        context = chosen.choices["context"]
        options.prefer("max_total_tokens", context.value, context.reason)
    options.prefer("watchdog_timeout", _WATCHDOG_S, t("seconds: experts take minutes to load"))
    options.add("enable-mixed-chunk", True, t("answers go on while prompts are read"))
    options.add("tensor-parallel-size", tensor_parallel.value, tensor_parallel.reason)
    options.add("enable-p2p-check", True, t("whether GPUs reach each other's memory"))
    options.prefer("served_model_name")
    apart = None if chosen is None or chosen.all_on_gpu else True
    options.prefer("disable_shared_experts_fusion", apart, t("experts on the CPU are apart from shared ones"))
    fp8 = chosen is not None and "FP8" in chosen.method
    options.prefer("fp8_gemm_backend", "triton" if fp8 else None, t("runs on every GPU with FP8"))
    for name, value in preferences.others(_HANDLED).items():
        options.add(name.replace("_", "-"), value, reason_of("the registry"))
    if server.api_key:
        options.add("api-key", server.api_key, t("clients are asked for it"))
    return options.found


def _add_experts(options: OptionList, server: Server, chosen: Chosen) -> None:
    method, threads, nodes = (chosen.choices[name] for name in ("method", "threads", "numa nodes"))
    source = t("converted experts") if server.weights else t("the experts of the model")
    options.add("kt-weight-path", server.weights or server.model, source)
    options.add("kt-cpuinfer", threads.value, threads.reason)
    options.add("kt-threadpool-count", len(nodes.value), t("NUMA nodes: {reason}", reason=nodes.reason))
    if server.named_nodes:
        options.add("kt-numa-nodes", nodes.value, nodes.reason)
    if gpu := chosen.choices.get("gpu experts"):
        options.add("kt-num-gpu-experts", max(1, int(gpu.value)), gpu.reason)  # 0 was tried with bf16 alone
    else:
        options.add("kt-num-gpu-experts", 1, t("no GPU is here to look at"))
    options.add("kt-method", method.value, method.reason)
    options.prefer("kt_gpu_prefill_token_threshold", _PREFILL_THRESHOLD, t("longer prompts are computed on the GPU"))
    options.add("kt-enable-dynamic-expert-update", True, t("the experts that are used most go to the GPU"))


def choose_tensor_parallel(machine: Machine, preferences: Preferences, most: int | None) -> Choice:
    """The largest power of two that there are GPUs for; `most`: of the model."""
    said = preferences.get("tensor_parallel_size")
    if said.value is not None:
        return Choice("tensor parallel", said.value, reason_of(said.source))
    gpus = max(1, min(len(machine.gpus), most or len(machine.gpus)))
    reason = t("the GPUs that there are: {gpus}", gpus=len(machine.gpus))
    return Choice("tensor parallel", 1 << (gpus.bit_length() - 1), reason)


def _memory_fraction(machine: Machine) -> tuple[float | None, str]:
    if not machine.gpus:
        return None, ""
    gpu = min(machine.gpus, key=lambda gpu: gpu.free_bytes / gpu.memory_bytes)
    free = (gpu.free_bytes - _GPU_RESERVE) / gpu.memory_bytes
    if free >= _MOST_OF_GPU:
        return _MOST_OF_GPU, t("the rest is for activations and CUDA graphs")
    return round(max(0.1, free), 2), t("others use a part of the GPU's memory")

"""Models that ``kt`` knows by name, with what is needed to plan before anything is downloaded.

The sizes are those of the models' config.json. `options` are what SGLang needs beside what the planner finds out, under
the names of the settings (inference.*), or of its options.
"""

from dataclasses import dataclass, field
from pathlib import Path

from kt_kernel import yaml_file
from kt_kernel.folders import config_folder
from kt_kernel.yaml_file import YamlFileError

FILE = "registry.yaml"


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention: what a token leaves in the cache is kv_rank + rope."""

    q_rank: int
    kv_rank: int
    nope: int  # of a head's query and key, without positions
    rope: int  # with
    value: int


@dataclass(frozen=True)
class Facts:
    layers: int
    dense_layers: int  # the first ones, without experts
    hidden: int
    experts: int
    top_k: int
    moe_intermediate: int
    shared_experts: int  # each as wide as the others
    dense_intermediate: int  # 0: there are no dense layers
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    encoding: str  # of the experts, a format of kt_kernel.methods
    rest: str = "bf16"  # of all other matrices
    tied: bool = False  # the output matrix is that of the embeddings
    mla: Mla | None = None
    attention: int | None = None  # weights of a layer's, where they follow from none of the above
    full_attention_every: int = 1  # the other layers have a state that does not grow with the tokens

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers

    @property
    def expert_weights(self) -> int:
        """Of all routed experts."""
        return self.moe_layers * self.experts * 3 * self.hidden * self.moe_intermediate


@dataclass(frozen=True)
class Known:
    name: str
    repo: str
    aliases: tuple[str, ...] = ()
    method: str | None = None  # None: what fits the checkpoint
    facts: Facts | None = None  # None: its config.json has to be there first
    max_tensor_parallel: int | None = None
    options: dict[str, object] = field(default_factory=dict)


_DEEPSEEK_MLA = Mla(q_rank=1536, kv_rank=512, nope=128, rope=64, value=128)

# layers, dense layers, hidden, experts, top-k, width of an expert, shared experts, width of dense layers, heads,
# kv heads, head dim, vocabulary, context, encoding of experts, of the rest
_DEEPSEEK_V3 = Facts(
    61, 3, 7168, 256, 8, 2048, 1, 18432, 128, 128, 192, 129280, 163840, "fp8", "fp8", mla=_DEEPSEEK_MLA
)
# Low ranks on both sides, and indexers in 20 of the layers: 111 and 126 million weights.
_DEEPSEEK_V4_FLASH = Facts(
    43, 0, 4096, 256, 6, 2048, 1, 0, 64, 1, 512, 129280, 1048576, "mxfp4", "fp8", attention=118_138_527
)
_KIMI_K2 = Facts(61, 1, 7168, 384, 8, 2048, 1, 18432, 64, 64, 192, 163840, 262144, "fp8", "fp8", mla=_DEEPSEEK_MLA)
_KIMI_K2_INT4 = Facts(61, 1, 7168, 384, 8, 2048, 1, 18432, 64, 64, 192, 163840, 262144, "rawint4", mla=_DEEPSEEK_MLA)
_MINIMAX_M2 = Facts(62, 0, 3072, 256, 8, 1536, 0, 0, 48, 8, 128, 200064, 196608, "fp8", "fp8")
_QWEN3_30B = Facts(48, 0, 2048, 128, 8, 768, 0, 0, 32, 4, 128, 151936, 40960, "bf16")
_QWEN3_30B_LONG = Facts(48, 0, 2048, 128, 8, 768, 0, 0, 32, 4, 128, 151936, 262144, "bf16")
_QWEN3_235B = Facts(94, 0, 4096, 128, 8, 1536, 0, 0, 64, 4, 128, 151936, 40960, "bf16")
_QWEN3_235B_LONG = Facts(94, 0, 4096, 128, 8, 1536, 0, 0, 64, 4, 128, 151936, 262144, "bf16")
_QWEN3_480B = Facts(62, 0, 6144, 160, 8, 2560, 0, 0, 96, 8, 128, 151936, 262144, "bf16")
_QWEN3_NEXT = Facts(48, 0, 2048, 512, 10, 512, 1, 0, 16, 2, 256, 151936, 262144, "bf16", full_attention_every=4)
_GLM_45 = Facts(92, 3, 5120, 160, 8, 1536, 1, 12288, 96, 8, 128, 151552, 131072, "bf16")
_GLM_46 = Facts(92, 3, 5120, 160, 8, 1536, 1, 12288, 96, 8, 128, 151552, 202752, "bf16")
_GLM_45_AIR = Facts(46, 1, 4096, 128, 8, 1408, 1, 10944, 96, 8, 128, 151552, 131072, "bf16")
_GPT_OSS_20B = Facts(24, 0, 2880, 32, 4, 2880, 0, 0, 64, 8, 64, 201088, 131072, "mxfp4")
_GPT_OSS_120B = Facts(36, 0, 2880, 128, 4, 2880, 0, 0, 64, 8, 64, 201088, 131072, "mxfp4")
_MIXTRAL_8X7B = Facts(32, 0, 4096, 8, 2, 14336, 0, 0, 32, 8, 128, 32000, 32768, "bf16")
_MIXTRAL_8X22B = Facts(56, 0, 6144, 8, 2, 16384, 0, 0, 48, 8, 128, 32768, 65536, "bf16")
_OLMOE = Facts(16, 0, 2048, 64, 8, 1024, 0, 0, 16, 16, 128, 50304, 4096, "bf16")

# The options of the models of the tutorials of kt-kernel.
_TRITON = {"attention_backend": "triton", "disable_shared_experts_fusion": True}
_LONG = {
    "kt_gpu_prefill_token_threshold": 4096,
    "attention_backend": "flashinfer",
    "max_total_tokens": 100_000,
    "max_running_requests": 16,
    "chunked_prefill_size": 32_768,
    "mem_fraction_static": 0.80,
    "watchdog_timeout": 3000,
    "disable_shared_experts_fusion": True,
}
_LONG_FP8 = {**_LONG, "fp8_gemm_backend": "triton"}
_MINIMAX = {**_LONG_FP8, "tool_call_parser": "minimax-m2", "reasoning_parser": "minimax-append-think"}
_KIMI = {**_LONG, "kt_gpu_prefill_token_threshold": 400}
_M3 = {**_LONG, "kt_gpu_prefill_token_threshold": 500, "mem_fraction_static": 0.55, "chunked_prefill_size": 8192}

KNOWN = (
    Known(
        "DeepSeek-V3-0324",
        "deepseek-ai/DeepSeek-V3-0324",
        ("deepseek-v3", "dsv3", "deepseek3", "v3-0324"),
        "AMXINT4",
        _DEEPSEEK_V3,
        options=_TRITON,
    ),
    Known("DeepSeek-V3.1", "deepseek-ai/DeepSeek-V3.1", ("dsv3.1", "v3.1"), "FP8", _DEEPSEEK_V3, options=_LONG_FP8),
    Known("DeepSeek-V3.2", "deepseek-ai/DeepSeek-V3.2", ("dsv3.2", "v3.2"), "FP8", _DEEPSEEK_V3, options=_LONG_FP8),
    Known(
        "DeepSeek-R1-0528",
        "deepseek-ai/DeepSeek-R1-0528",
        ("deepseek-r1", "dsr1", "r1"),
        "AMXINT4",
        _DEEPSEEK_V3,
        options=_TRITON,
    ),
    Known(
        "DeepSeek-V4-Flash",
        "deepseek-ai/DeepSeek-V4-Flash",
        ("dsv4-flash", "v4-flash"),
        "MXFP4",
        _DEEPSEEK_V4_FLASH,
        options=_LONG,
    ),
    Known(
        "Kimi-K2-Thinking",
        "moonshotai/Kimi-K2-Thinking",
        ("kimi", "k2", "kimi-k2"),
        "RAWINT4",
        _KIMI_K2_INT4,
        options=_KIMI,
    ),
    Known("Kimi-K2.5", "moonshotai/Kimi-K2.5", ("k2.5",), "RAWINT4", _KIMI_K2_INT4, options=_KIMI),
    Known(
        "Kimi-K2-Instruct-0905",
        "moonshotai/Kimi-K2-Instruct-0905",
        ("k2-instruct",),
        "FP8",
        _KIMI_K2,
        options=_LONG_FP8,
    ),
    Known("MiniMax-M2", "MiniMaxAI/MiniMax-M2", ("m2",), "FP8", _MINIMAX_M2, 4, _MINIMAX),
    Known("MiniMax-M2.1", "MiniMaxAI/MiniMax-M2.1", ("m2.1",), "FP8", _MINIMAX_M2, 4, _MINIMAX),
    Known("MiniMax-M2.5", "MiniMaxAI/MiniMax-M2.5", ("m2.5",), "FP8", _MINIMAX_M2, 4, _MINIMAX),
    Known("MiniMax-M2.7", "MiniMaxAI/MiniMax-M2.7", ("m2.7",), "FP8", _MINIMAX_M2, 4, _MINIMAX),
    Known("MiniMax-M3", "MiniMaxAI/MiniMax-M3", ("m3",), "MXFP8", None, 8, _M3),
    Known("Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B", ("qwen3-30b",), None, _QWEN3_30B, 4),
    Known(
        "Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-30B-A3B-Instruct-2507", ("qwen3-30b-2507",), None, _QWEN3_30B_LONG, 4
    ),
    Known("Qwen3-Coder-30B-A3B", "Qwen/Qwen3-Coder-30B-A3B-Instruct", ("qwen3-coder",), None, _QWEN3_30B_LONG, 4),
    Known("Qwen3-235B-A22B", "Qwen/Qwen3-235B-A22B", ("qwen3-235b",), None, _QWEN3_235B, 4),
    Known(
        "Qwen3-235B-A22B-Instruct-2507",
        "Qwen/Qwen3-235B-A22B-Instruct-2507",
        ("qwen3-235b-2507",),
        None,
        _QWEN3_235B_LONG,
        4,
    ),
    Known(
        "Qwen3-Coder-480B-A35B",
        "Qwen/Qwen3-Coder-480B-A35B-Instruct",
        ("qwen3-480b", "qwen3-coder-480b"),
        None,
        _QWEN3_480B,
        8,
    ),
    Known("Qwen3-Next-80B-A3B", "Qwen/Qwen3-Next-80B-A3B-Instruct", ("qwen3-next", "qwen3-80b"), None, _QWEN3_NEXT, 2),
    Known("GLM-4.5", "zai-org/GLM-4.5", ("glm4.5",), None, _GLM_45, 8),
    Known("GLM-4.5-Air", "zai-org/GLM-4.5-Air", ("glm4.5-air", "glm-air"), None, _GLM_45_AIR, 8),
    Known("GLM-4.6", "zai-org/GLM-4.6", ("glm4.6",), None, _GLM_46, 8),
    Known("GLM-4.7", "zai-org/GLM-4.7", ("glm4.7",), None, _GLM_46, 8),
    Known("gpt-oss-20b", "openai/gpt-oss-20b", ("oss-20b",), None, _GPT_OSS_20B, 8),
    Known("gpt-oss-120b", "openai/gpt-oss-120b", ("oss-120b",), None, _GPT_OSS_120B, 8),
    Known("Mixtral-8x7B", "mistralai/Mixtral-8x7B-Instruct-v0.1", ("mixtral", "8x7b"), None, _MIXTRAL_8X7B, 8),
    Known("Mixtral-8x22B", "mistralai/Mixtral-8x22B-Instruct-v0.1", ("8x22b",), None, _MIXTRAL_8X22B, 8),
    Known("OLMoE-1B-7B", "allenai/OLMoE-1B-7B-0924-Instruct", ("olmoe",), None, _OLMOE, 16),
)


def known_models() -> tuple[Known, ...]:
    """KNOWN, and those of registry.yaml, which stand for those of the same name."""
    added = _added()
    names = {model.name.lower() for model in added}
    return (*added, *(model for model in KNOWN if model.name.lower() not in names))


def _added() -> list[Known]:
    path = config_folder() / FILE
    found = yaml_file.read(path).get("models") or {}
    if not isinstance(found, dict):
        raise YamlFileError("{path}: 'models' must hold names of models: correct it, or move it away", path=path)
    return [_read(path, str(name), fields) for name, fields in found.items()]


def _read(path: Path, name: str, fields: object) -> Known:
    fields = fields if isinstance(fields, dict) else {}
    repo, aliases, options = fields.get("hf_repo"), fields.get("aliases") or [], fields.get("default_params") or {}
    if not isinstance(repo, str) or not isinstance(aliases, list) or not isinstance(options, dict):
        raise YamlFileError(
            "{path}: model '{name}' needs hf_repo, as in 'org/name'; aliases are a list, default_params a mapping",
            path=path,
            name=name,
        )
    options = {str(key).replace("-", "_"): value for key, value in options.items()}
    method = options.pop("kt_method", None)
    return Known(name, repo, tuple(map(str, aliases)), method, None, fields.get("max_tensor_parallel_size"), options)

"""The options of ``kt run``: of both engines, of the embedded one, of SGLang; also under names of earlier versions."""

from typing import Annotated

import typer

from kt_kernel.cli.language import t

LINEARS = ("auto", "bf16", "int8", "int4", "int4g", "torch")  # torch: not packed

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="A folder, a name or alias, a hub id, or 'demo'. What kt does not know goes to SGLang.",
    ),
]
Engine = Annotated[
    str | None, typer.Option("--engine", help="embedded, or sglang (default: sglang if it is here with a GPU).")
]
Host = Annotated[
    str | None, typer.Option("--host", "-H", help="Where to listen; 0.0.0.0 for every network (default: server.host).")
]
Port = Annotated[
    int | None, typer.Option("--port", "-p", min=0, max=65535, help="0 takes a free one (default: server.port).")
]
ModelPath = Annotated[str | None, typer.Option("--model-path", help="MODEL, as an option.")]
WeightsPath = Annotated[
    str | None, typer.Option("--weights-path", help="Converted experts, or GGUF (default: those of the model).")
]
Method = Annotated[
    str | None,
    typer.Option("--method", "--kt-method", "-m", help="How experts are packed: auto, BF16, AMXINT8, INT4G, ..."),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", "--cpu-threads", min=1, help="Worker threads (default: one for each physical core)."),
]
NumaNodes = Annotated[
    list[int] | None,
    typer.Option("--numa-nodes", min=0, help="How many NUMA nodes; given more than once: their numbers."),
]
Slots = Annotated[
    int | None,
    typer.Option("--slots", "--max-running-requests", min=1, max=1024, help="Answers at once (default: what fits)."),
]
Name = Annotated[
    str | None, typer.Option("--name", "--served-model-name", help="What the model is called (default: its folder).")
]
ApiKey = Annotated[str | None, typer.Option("--api-key", help="Ask clients for this key (better: KT_KERNEL_API_KEY).")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Download the model without a question.")]
Planned = Annotated[
    bool, typer.Option("--plan/--no-plan", help="Say first what to expect; refuse what does not fit into memory.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the command, and start nothing.")]

Context = Annotated[
    int | None,
    typer.Option("--context", min=16, help="Embedded: tokens of prompt and answer (default: what memory allows)."),
]
Linears = Annotated[
    str, typer.Option("--linears", help="Embedded: how all other matrices are packed: auto, bf16, int8, int4, torch.")
]
MaxQueue = Annotated[int, typer.Option("--max-queue", min=0, help="Embedded: requests that may wait; more get 429.")]
MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", min=1, help="Embedded: longest answer (default: up to the context).")
]
Cors = Annotated[
    list[str] | None,
    typer.Option("--cors", help="Embedded: origin of a web page that may call; repeat for more; '*' is all."),
]
AllowHost = Annotated[
    list[str] | None, typer.Option("--allow-host", help="Embedded: another name under which clients call the server.")
]
StrictModel = Annotated[
    bool, typer.Option("--strict-model", help="Embedded: refuse requests for other models instead of answering all.")
]
Grace = Annotated[
    float, typer.Option("--grace", min=0, help="Embedded: seconds that running answers get when the server stops.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Embedded: no line for each request.")]

GpuExperts = Annotated[
    int | None, typer.Option("--gpu-experts", min=0, help="SGLang: experts of each layer on the GPU (default: fits).")
]
TensorParallel = Annotated[
    int | None, typer.Option("--tensor-parallel-size", "--tp", min=1, help="SGLang: GPUs that share the model.")
]
PrefillThreshold = Annotated[
    int | None,
    typer.Option(
        "--kt-gpu-prefill-threshold",
        "--kt-gpu-prefill-token-threshold",
        min=0,
        help="SGLang: prompts of so many tokens have all experts computed on the GPU.",
    ),
]
AttentionBackend = Annotated[str | None, typer.Option("--attention-backend", help="SGLang: triton, flashinfer, ...")]
MaxTotalTokens = Annotated[
    int | None, typer.Option("--max-total-tokens", min=1, help="SGLang: tokens of all requests together.")
]
ChunkedPrefill = Annotated[
    int | None, typer.Option("--chunked-prefill-size", min=1, help="SGLang: tokens of a piece of a prompt.")
]
MemFraction = Annotated[
    float | None,
    typer.Option("--mem-fraction-static", min=0.05, max=1, help="SGLang: share of GPU memory for weights and keys."),
]
Watchdog = Annotated[
    float | None, typer.Option("--watchdog-timeout", min=1, help="SGLang: seconds after which a step is given up.")
]
SharedFusion = Annotated[
    bool | None,
    typer.Option(
        "--enable-shared-experts-fusion/--disable-shared-experts-fusion", help="SGLang: shared experts with the others."
    ),
]

EMBEDDED_ONLY = {
    "context_tokens": "--context",
    "linears": "--linears",
    "max_queue": "--max-queue",
    "max_tokens": "--max-tokens",
    "cors": "--cors",
    "allow_host": "--allow-host",
    "strict_model": "--strict-model",
    "grace": "--grace",
    "quiet": "--quiet",
}
SGLANG_ONLY = {
    "gpu_experts": "--gpu-experts",
    "tensor_parallel_size": "--tensor-parallel-size",
    "kt_gpu_prefill_token_threshold": "--kt-gpu-prefill-threshold",
    "attention_backend": "--attention-backend",
    "max_total_tokens": "--max-total-tokens",
    "chunked_prefill_size": "--chunked-prefill-size",
    "mem_fraction_static": "--mem-fraction-static",
    "watchdog_timeout": "--watchdog-timeout",
    "shared_experts_fusion": "--enable-shared-experts-fusion",
}


def split(arguments: list[str] | None, model_path: str | None) -> tuple[str | None, list[str]]:
    """(MODEL, options of SGLang). MODEL comes before options that are not kt's: their values look alike."""
    words = list(arguments or [])
    model = words.pop(0) if words and not words[0].startswith("-") else None
    if model_path is not None:
        if model is not None:
            raise typer.BadParameter(t("the model is named twice"), param_hint="--model-path")
        return model_path, words
    if model is None and words:
        message = t("put MODEL before {option}, which is passed on", option=words[0])
        raise typer.BadParameter(message, param_hint="MODEL")
    return model, words

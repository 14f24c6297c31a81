"""open_engine: from a folder to an engine that runs. Nothing heavy is imported before it is called."""

import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kt_kernel.engine.api import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from kt_kernel.engine.chunks import ChunkPlan
    from kt_kernel.engine.engine import SlotEngine
    from kt_kernel.engine.forward import Forward

log = logging.getLogger(__name__)

# Of a request that runs alone, whose chunks bound nothing but memory and the time until a cancel is seen.
ALONE_CHUNK = 512
UNKNOWN_CONTEXT = 8192  # of models whose config does not tell
# Types that transformers knows by another name. What comes with such a model is code for older versions of it.
OTHER_NAMES = {"kimi_k2": "deepseek_v3"}
RENAMED = "kt_renamed"  # of a config that the folder has under another type


def open_engine(
    path: "str | os.PathLike[str]",
    *,
    name: str | None = None,
    slots: int | None = None,
    context: int | None = None,
    threads: int | None = None,
    numa_nodes: Sequence[int] | None = None,
    method: str = "auto",
    weight_path: "str | os.PathLike[str] | None" = None,
    linears: str | None = "auto",
    max_queue: int = 256,
    stall_ms: float = 200.0,
    chunk_tokens: int | None = None,
    trust_remote_code: bool = False,
) -> "SlotEngine":
    """The engine of the model in a folder.

    Args:
        path: a checkpoint as transformers reads it: config.json, tokenizer, safetensors.
        name: what the model is called; None = the folder's name.
        slots: requests that run at once; None = what memory allows, up to 16.
        context: tokens of a request, prompt and answer; None = what memory and the model allow.
        threads: of our pool and of torch; None = one for each physical core.
        method, weight_path, numa_nodes: of the experts, as of KTConfig; linears are on the same nodes.
        linears: the format of all others on our kernels: bf16, int8, int4 or int4g; "auto" = bf16 where that is faster
            than torch, None = torch's, where decode stays with transformers and may depend on what else runs.
        max_queue: requests that may wait for a slot.
        stall_ms: how long running answers may wait for a piece of another's prompt.
        chunk_tokens: the size of such pieces, a power of two; None = measured. The same size gives the same tokens
            after a restart, whatever the load of the machine was.
    """
    # Read when torch is imported: its threads would spin on the cores that our pool computes on.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    path = _checked_folder(path)
    _check_chunk(chunk_tokens)

    import torch

    from kt_kernel.engine.engine import SlotEngine
    from kt_kernel.engine.sizes import check_sizes
    from kt_kernel.engine.text import end_tokens, open_text

    config = _read_config(path, trust_remote_code)
    check_sizes(slots, context, _model_context(config))
    torch.set_num_threads(threads or _physical_cores())
    text = open_text(path, trust_remote_code)
    experts = {"method": method, "weight_path": weight_path, "threads": threads, "numa_nodes": numa_nodes}
    model = _load_model(path, config, experts, trust_remote_code)
    packed = _pack_linears(model, linears, threads, numa_nodes)
    forward = _sized_forward(model, slots, context)
    return SlotEngine(
        name or path.resolve().name,
        forward,
        text,
        _prepare(forward, stall_ms / 1000, chunk_tokens, packed),
        vocabulary_size=model.get_input_embeddings().weight.shape[0],
        end_tokens=end_tokens(model.generation_config, text.tokenizer),
        defaults=default_sampling(path),
        max_queue=max_queue,
    )


def _checked_folder(path: "str | os.PathLike[str]") -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: give the folder of a checkpoint, with config.json in it")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.json: is it the folder of a checkpoint?")
    return folder


def _check_chunk(chunk_tokens: int | None) -> None:
    if chunk_tokens is not None and (chunk_tokens < 1 or chunk_tokens & (chunk_tokens - 1)):
        raise ValueError(f"chunk_tokens is {chunk_tokens}: it must be a power of two")


def _physical_cores() -> int:
    from kt_kernel.machine.system import physical_cores

    return physical_cores()


def _read_config(path: Path, trust_remote_code: bool) -> "PreTrainedConfig":
    from transformers import AutoConfig, PreTrainedConfig

    given, _ = PreTrainedConfig.get_config_dict(path)
    known = OTHER_NAMES.get(given.get("model_type"))
    if known is None:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    log.info("%s is %s for transformers", given["model_type"], known)
    others = {name: value for name, value in given.items() if name not in ("model_type", "auto_map", "architectures")}
    return AutoConfig.for_model(known, **others, **{RENAMED: True})


def _model_context(config: "PreTrainedConfig") -> int:
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or UNKNOWN_CONTEXT


def _load_model(
    path: Path, config: "PreTrainedConfig", experts: dict[str, object], trust_remote_code: bool
) -> "PreTrainedModel":
    """`experts`: arguments of KTConfig."""
    import torch

    from kt_kernel.hf import KTConfig
    from kt_kernel.hf.experts import find_experts

    start = time.perf_counter()
    auto_class = _auto_class(config)
    with torch.device("meta"):
        skeleton = auto_class.from_config(config, trust_remote_code=trust_remote_code)
    plugin = {"config": config} if getattr(config, RENAMED, False) else {}
    if list(find_experts(skeleton)):
        plugin["quantization_config"] = KTConfig(**experts)
    else:
        log.info("%s has no experts: transformers computes all of it", config.model_type)
    model = auto_class.from_pretrained(path, dtype=torch.bfloat16, trust_remote_code=trust_remote_code, **plugin)
    log.info("%s loaded in %.1f s", config.model_type, time.perf_counter() - start)
    return model.eval()


def _auto_class(config: "PreTrainedConfig") -> type:
    """Models that also see are served for text if transformers has no text-only class for them."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if type(config) in AutoModelForCausalLM._model_mapping or hasattr(config, "auto_map"):
        return AutoModelForCausalLM
    if type(config) in AutoModelForImageTextToText._model_mapping:
        log.info("%s is served for text only", config.model_type)
        return AutoModelForImageTextToText
    raise ValueError(f"{config.model_type} is no model that generates text, as far as transformers knows")


def _pack_linears(
    model: "PreTrainedModel", linears: str | None, threads: int | None, numa_nodes: Sequence[int] | None
) -> bool:
    """Whether they were; the native decoder takes nothing else."""
    from kt_kernel import __cpu_variant__
    from kt_kernel.hf.linear import KTLinear, preferred_format, replace_linears
    from kt_kernel.runtime import plan_pool, runtime_for

    weight_format = preferred_format(__cpu_variant__) if linears == "auto" else linears
    if weight_format is None or model.device.type != "cpu":
        log.info("linears are computed by torch")
        return False
    count = replace_linears(model, weight_format, runtime_for(plan_pool(threads, None, numa_nodes)))
    log.info("%d linears in %s", count, weight_format)
    head = model.get_output_embeddings()
    if isinstance(head, KTLinear):
        # An output has the input's dtype. In bf16 logits around 25 would be multiples of 1/8, and many of them equal.
        head.register_forward_pre_hook(lambda _, args: (args[0].float(), *args[1:]))
    return True


def _prepare(forward: "Forward", budget_s: float, chunk_tokens: int | None, packed: bool) -> "ChunkPlan":
    import torch

    from kt_kernel.engine import native
    from kt_kernel.engine.forward import SlotForward
    from kt_kernel.engine.rope import pin_frequencies

    if pin_frequencies(forward.model, forward.context):
        log.info("rotary frequencies are those of %d tokens, for texts of any length", forward.context)
    with torch.inference_mode():
        chunks = _chunks(forward, budget_s, chunk_tokens)
        if packed and isinstance(forward, SlotForward):
            forward.use_native(native.build)
    log.info("decode by %s; prompts in pieces of %s", forward.decoder, _sizes(chunks, forward.context))
    return chunks


def _sized_forward(model: "PreTrainedModel", slots: int | None, context: int | None) -> "Forward":
    """Tried with a small cache first: only the model's own keys tell how large a token's are."""
    import torch

    from kt_kernel.engine.forward import PROBE_TOKENS, SlotForward, open_forward
    from kt_kernel.engine.sizes import choose_sizes
    from kt_kernel.machine.system import available_bytes

    model_context = _model_context(model.config)
    with torch.inference_mode():
        forward = open_forward(model, slots=2, context=PROBE_TOKENS)
    if not isinstance(forward, SlotForward):
        forward.context = choose_sizes(1, context, model_context, 0, available_bytes())[1]
        log.info("one request at a time, of %d tokens: the model's layers keep a state", forward.context)
        return forward
    per_token = forward.cache.bytes_per_token
    slots, context = choose_sizes(slots, context, model_context, per_token, available_bytes())
    forward.resize(slots, context)
    log.info(
        "%d slots of %d tokens: up to %.1f GB of keys and values", slots, context, slots * context * per_token / 1e9
    )
    return forward


def _chunks(forward: "Forward", budget_s: float, chunk_tokens: int | None) -> "ChunkPlan":
    from kt_kernel.engine.chunks import MAX_CHUNK, fixed, measure
    from kt_kernel.engine.forward import SlotForward, probe_tokens

    if forward.whole_prompts:
        return fixed(1 << 40)
    if chunk_tokens is not None or not isinstance(forward, SlotForward):
        return fixed(chunk_tokens or ALONE_CHUNK)
    tokens = probe_tokens(forward.model, min(MAX_CHUNK, forward.context))

    def prefill(position: int, n: int) -> None:
        # Keys before position were never written; what they hold changes no time, and reading them takes no memory.
        forward.cache.lengths[0] = position
        forward.prefill(0, tokens[:n], n_logits=0)
        forward.keep(0, 0)

    return measure(prefill, budget_s, forward.context)


def _sizes(chunks: "ChunkPlan", context: int) -> str:
    sizes = [size for start, size in chunks.ranges if start < context]
    largest, smallest = sizes[0], sizes[-1]
    if largest > context:
        return "any length"
    return f"{largest} tokens" if largest == smallest else f"{largest} to {smallest} tokens"


def default_sampling(folder: Path) -> Sampling:
    """What generation_config.json says; of transformers' own defaults, such as a top_k of 50, nothing."""
    try:
        given = json.loads((folder / "generation_config.json").read_text())
    except (OSError, ValueError):
        return Sampling()
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return Sampling(**{name: given[name] for name in names if isinstance(given.get(name), (int, float))})

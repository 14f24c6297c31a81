"""Quantises a model for the GPU: W4A16 or W8A16 by GPTQ or by rounding, through llmcompressor, which is optional.

Only the routed experts are quantised. What decides where tokens go or sees every token (routers, attention, shared
experts, dense layers, heads, towers for images) stays as it is: small beside the experts, and sensitive.
"""

import argparse
import importlib.util
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from kt_kernel.convert.errors import ConvertError
from kt_kernel.weights.config import model_config

PACKAGES = ("accelerate", "datasets", "llmcompressor", "transformers")

# Modules that stay as they are, as regular expressions for their whole names.
_EVERYWHERE = (r"(.*\.)?lm_head", r".*self_attn.*", r"(.*\.)?(visual|vision_tower|vision_model|audio_tower)\..*")
_MLP_GATE = r".*\.mlp\.gate"
_SHARED = r".*\.shared_experts?\..*"
_SHARED_GATE = r".*\.shared_expert_gate"
_LINEAR_ATTENTION = r".*\.linear_attn\..*"

_ALL_BUT_EXPERTS = r"(?!.*\.experts\.\d+\.).*"

# model_type -> beyond _EVERYWHERE. Of families that are not listed only what is called an expert is quantised.
FAMILIES = {
    "qwen2_moe": (_MLP_GATE, _SHARED, _SHARED_GATE),
    "qwen3_moe": (_MLP_GATE,),
    "qwen3_vl_moe": (_MLP_GATE,),
    "qwen3_next": (_MLP_GATE, _SHARED, _SHARED_GATE, _LINEAR_ATTENTION),
    "qwen3_5_moe": (_MLP_GATE, _SHARED, _SHARED_GATE, _LINEAR_ATTENTION),
    "qwen3_5_moe_text": (_MLP_GATE, _SHARED, _SHARED_GATE, _LINEAR_ATTENTION),
    "deepseek_v2": (_MLP_GATE, _SHARED),
    "deepseek_v3": (_MLP_GATE, _SHARED),
    "deepseek_v32": (_MLP_GATE, _SHARED),
    "kimi_k2": (_MLP_GATE, _SHARED),
    "glm4_moe": (_MLP_GATE, _SHARED),
    "glm4_moe_lite": (_MLP_GATE, _SHARED),
    "olmoe": (_MLP_GATE,),
    "mixtral": (r".*\.block_sparse_moe\.gate", _MLP_GATE),
    "minimax_m2": (r".*\.block_sparse_moe\.gate", _MLP_GATE),
    "phimoe": (r".*\.block_sparse_moe\.(gate|router)", r".*\.mlp\.router"),
    "granitemoe": (r".*\.block_sparse_moe\.router.*",),
    "gpt_oss": (r".*\.mlp\.router",),
    "llama4": (r".*\.feed_forward\.router", r".*\.feed_forward\.shared_expert\..*", r".*multi_modal_projector.*"),
    "jamba": (r".*\.feed_forward\.router", r".*\.mamba\..*"),
}
_GROUP_SIZES = (128, 64, 32)
_DTYPES = ("bfloat16", "float16", "float32")


def ignored(model_type: str, dense_layers: Iterable[int] = (), more: Sequence[str] = ()) -> list[str]:
    """What llmcompressor is to leave alone: "re:..." patterns, and `more` as it is given."""
    rows = FAMILIES.get(model_type, (_ALL_BUT_EXPERTS,))
    dense = [rf".*\.layers\.{layer}\.(mlp|feed_forward)\..*" for layer in dense_layers]
    return [*(f"re:{pattern}$" for pattern in (*_EVERYWHERE, *rows, *dense)), *more]


def is_ignored(module: str, patterns: Iterable[str]) -> bool:
    """As compressed-tensors decides it: a pattern matches from the beginning, other entries are whole names."""
    return any(
        re.match(pattern.removeprefix("re:"), module) if pattern.startswith("re:") else pattern == module
        for pattern in patterns
    )


def dense_layers(config_folder: Path) -> list[int]:
    """Layers without experts, as far as config.json tells."""
    with suppress(OSError, ValueError):
        found = model_config(config_folder)
        return [layer for layer in range(found.num_layers) if layer not in found.moe_layers]
    return []


def windows(ids: Sequence[int], length: int, count: int) -> list[list[int]]:
    """Up to `count` pieces of `length` tokens, spread evenly; a text that is shorter is one piece."""
    if len(ids) <= length:
        return [list(ids)] if ids else []
    whole = len(ids) // length
    wanted = min(count, whole)
    return [list(ids[at : at + length]) for at in (index * whole // wanted * length for index in range(wanted))]


def text_of(row: dict, template) -> str:
    """A row of a data set as text. `template` turns messages into text."""
    if "messages" in row:
        return template(row["messages"])
    if "text" in row:
        return row["text"]
    raise ConvertError(
        f"--dataset: its rows have {', '.join(row)}; needed is 'messages' (chats) or 'text'. A text file will do, too"
    )


def group_size_for(widths: Iterable[int]) -> int:
    """The largest group that divides every width: 128 as the schemes have it, else 64 or 32."""
    widths = set(widths)
    for size in _GROUP_SIZES:
        if all(width % size == 0 for width in widths):
            return size
    shown = ", ".join(map(str, sorted(widths)))
    raise ConvertError(
        f"the experts are {shown} columns wide: no group of {', '.join(map(str, _GROUP_SIZES))} divides that"
    )


def missing_packages() -> list[str]:
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="Quantise the routed experts of a model for the GPU.")
    add = made.add_argument
    add("--model_id", required=True, help="folder of the model, or its name on the hub")
    add("--output_dir", required=True, type=Path)
    add("--quant_method", choices=["GPTQ", "RTN"], default="GPTQ")
    add("--quant_type", choices=["W4A16", "W8A16"], default="W8A16")
    add(
        "--group_size",
        type=int,
        choices=_GROUP_SIZES,
        help="weights with one scale (default: the largest that divides)",
    )
    add("--num_calibration_samples", type=int, default=512)
    add("--max_sequence_length", type=int, default=2048)
    add("--dampening_frac", type=float, default=0.1)
    add("--dataset", default="HuggingFaceH4/ultrachat_200k", help="data set of the hub, or a text file")
    add("--dataset_split", default="train_sft")
    add("--ignore_patterns", nargs="*", default=[], help="more modules to leave alone: names, or re:PATTERN")
    add("--torch_dtype", choices=_DTYPES, default="bfloat16")
    add("--trust_remote_code", action="store_true")
    add("--random_seed", type=int, default=42)
    add("--force_cpu", action="store_true", help="do not use GPUs")
    add("--max_gpu_memory", help="of each GPU, as 40GiB")
    add("--max_cpu_memory", help="as 400GiB")
    return made


def check(given: argparse.Namespace) -> None:
    for name in ("num_calibration_samples", "max_sequence_length"):
        if getattr(given, name) < 1:
            raise ConvertError(f"--{name} must be at least 1")
    if given.output_dir.is_dir() and any(given.output_dir.iterdir()):
        raise ConvertError(f"--output_dir {given.output_dir} is not empty; choose another folder")
    if absent := missing_packages():
        raise ConvertError(
            f"{', '.join(absent)} is not installed: pip install 'kt-kernel[convert]' (llmcompressor asks for "
            "versions of torch and transformers of its own: an environment of its own is best)"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser()
    given = made.parse_args(arguments)
    try:
        check(given)
        _quantise(given)
    except (ConvertError, OSError, ValueError) as error:
        print(f"{made.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def _quantise(given: argparse.Namespace) -> None:
    import torch
    from llmcompressor import oneshot
    from transformers import AutoTokenizer

    torch.manual_seed(given.random_seed)
    tokenizer = AutoTokenizer.from_pretrained(given.model_id, trust_remote_code=given.trust_remote_code)
    model = _load(given, torch)
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        patterns = ignored(model.config.model_type, dense_layers(Path(folder)), given.ignore_patterns)
    widths = _widths_of_experts(model, patterns)
    given.group_size = given.group_size or group_size_for(widths)
    calibration = {}
    if given.quant_method == "GPTQ":
        samples = _calibration(given, tokenizer)
        calibration = {
            "dataset": samples,
            "num_calibration_samples": len(samples),
            "max_seq_length": given.max_sequence_length,
        }
    oneshot(model=model, recipe=_recipe(given, patterns), tokenizer=tokenizer, **calibration)
    model.save_pretrained(given.output_dir, save_compressed=True)
    tokenizer.save_pretrained(given.output_dir)
    print(f"{given.output_dir}: {given.quant_type} by {given.quant_method}")


def _load(given: argparse.Namespace, torch):
    """The model, each expert as linear layers: transformers 5 keeps those of a layer in one tensor.

    llmcompressor 0.14 loads them so, but transformers 5.17 then imports torchvision; without it, and for older ones,
    they are split after loading, which takes more memory.
    """
    from llmcompressor import utils
    from transformers import AutoModelForCausalLM

    split_while_loading = hasattr(utils, "load_context") and importlib.util.find_spec("torchvision") is not None
    with utils.load_context() if split_while_loading else nullcontext():
        model = AutoModelForCausalLM.from_pretrained(
            given.model_id,
            dtype=getattr(torch, given.torch_dtype),
            trust_remote_code=given.trust_remote_code,
            **_placement(given, torch),
        )
    with suppress(ImportError):
        from llmcompressor.modeling.moe.linearize import linearize_moe

        linearize_moe(model)
    return model


def _placement(given: argparse.Namespace, torch) -> dict[str, object]:
    if given.force_cpu or not torch.cuda.is_available():
        return {"device_map": "cpu"}
    limits: dict[object, str] = {}
    if given.max_gpu_memory:
        limits |= dict.fromkeys(range(torch.cuda.device_count()), given.max_gpu_memory)
    if given.max_cpu_memory:
        limits["cpu"] = given.max_cpu_memory
    return {"device_map": "auto", **({"max_memory": limits} if limits else {})}


def _widths_of_experts(model, patterns: list[str]) -> set[int]:
    """Columns of what is going to be quantised: something must remain, and it should be experts."""
    import torch

    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    kept = [name for name in linears if not is_ignored(name, patterns)]
    if not kept:
        raise ConvertError(
            f"no linear layer of {model.config.model_type} is left to quantise: are its experts single layers in this "
            "version of transformers and llmcompressor?"
        )
    others = [name for name in kept if "expert" not in name]
    if others:
        print(f"also quantised, though no experts: {', '.join(others[:4])}{' ...' if others[4:] else ''}", flush=True)
    print(f"{len(kept)} of {len(linears)} linear layers are quantised", flush=True)
    return {linears[name].in_features for name in kept}


def _calibration(given: argparse.Namespace, tokenizer):
    """A data set of token ids."""
    from datasets import Dataset, load_dataset

    if Path(given.dataset).is_file():
        ids = tokenizer(Path(given.dataset).read_text(), add_special_tokens=False)["input_ids"]
        pieces = windows(ids, given.max_sequence_length, given.num_calibration_samples)
        if not pieces:
            raise ConvertError(f"--dataset {given.dataset} is empty")
    else:
        rows = load_dataset(given.dataset, split=given.dataset_split).shuffle(seed=given.random_seed)
        rows = rows.select(range(min(given.num_calibration_samples, len(rows))))

        def template(messages) -> str:
            return tokenizer.apply_chat_template(messages, tokenize=False)

        limits = {"max_length": given.max_sequence_length, "truncation": True, "add_special_tokens": False}
        pieces = [tokenizer(text_of(row, template), **limits)["input_ids"] for row in rows]
    return Dataset.from_dict({"input_ids": pieces, "attention_mask": [[1] * len(piece) for piece in pieces]})


def _recipe(given: argparse.Namespace, patterns: list[str]):
    from compressed_tensors.quantization import preset_name_to_scheme

    preset = preset_name_to_scheme(given.quant_type, ["Linear"])
    preset.weights.group_size = given.group_size
    scheme = {"config_groups": {"group_0": preset}, "ignore": patterns}
    if given.quant_method == "RTN":
        from llmcompressor.modifiers.quantization import QuantizationModifier

        return QuantizationModifier(**scheme)
    from llmcompressor.modifiers.gptq import GPTQModifier

    return GPTQModifier(**scheme, dampening_frac=given.dampening_frac)

"""The sizes of a model: from the config.json of its folder, or from the registry before anything is downloaded."""

from dataclasses import dataclass
from pathlib import Path

from kt_kernel.errors import UserError
from kt_kernel.registry.known import Facts, Mla
from kt_kernel.weights.config import model_config, text_fields
from kt_kernel.weights.gguf_files import holds_gguf
from kt_kernel.weights.tensor_files import parse_json

# quantization_config.quant_method -> format of the experts that a checkpoint holds.
_ENCODINGS = {
    "fp8": "fp8",
    "mxfp4": "mxfp4",
    "mxfp8": "mxfp8",
    "gptq": "int4z",
    "awq": "int4z",
    "auto-round": "int4z",
}
# Families whose config.json counts shared experts under other names, or gives their size.
_SHARED_COUNT = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SHARED_SIZE = ("shared_expert_intermediate_size", "shared_intermediate_size")
_UNKNOWN_CONTEXT = 8192


@dataclass(frozen=True)
class PlannedModel:
    name: str
    facts: Facts
    folder: Path | None = None  # None: not here
    file_bytes: int | None = None  # of its weights on the disk


def model_of_folder(name: str, folder: Path) -> PlannedModel:
    """UserError where config.json is missing or does not tell a size."""
    if holds_gguf(folder) and not (folder / "config.json").is_file():
        raise UserError(
            "{folder} holds GGUF files only: planning needs the config.json of the original model beside them",
            folder=folder,
        )
    try:
        return _model_of_folder(name, folder)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(str(error)) from None


def _model_of_folder(name: str, folder: Path) -> PlannedModel:
    found = model_config(folder)
    path = folder / "config.json"
    whole = parse_json(path, path.read_bytes())
    fields = text_fields(whole)
    heads = _number(path, fields, "num_attention_heads")
    encoding = _encoding(whole, fields)
    mla = _mla(fields)
    facts = Facts(
        layers=found.num_layers,
        dense_layers=found.num_layers - len(found.moe_layers),
        hidden=found.hidden_size,
        experts=found.num_experts,
        top_k=found.num_experts_per_tok,
        moe_intermediate=found.moe_intermediate_size,
        shared_experts=_shared(fields, found.moe_intermediate_size),
        dense_intermediate=fields.get("intermediate_size") or 0,
        heads=heads,
        kv_heads=fields.get("num_key_value_heads") or heads,
        head_dim=fields.get("head_dim") or found.hidden_size // heads,
        vocab=_number(path, fields, "vocab_size"),
        context=fields.get("max_position_embeddings") or _UNKNOWN_CONTEXT,
        encoding=encoding,
        rest="fp8" if encoding == "fp8" else "bf16",
        tied=bool(fields.get("tie_word_embeddings", whole.get("tie_word_embeddings", False))),
        mla=mla,
        full_attention_every=_full_attention_every(fields, found.num_layers),
    )
    sizes = [file.stat().st_size for file in folder.iterdir() if file.suffix in (".safetensors", ".gguf", ".bin")]
    return PlannedModel(name, facts, folder, sum(sizes) or None)


def _number(path: Path, fields: dict, name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or value < 1:
        raise ValueError(f"{path}: {name} is {value!r}; needed is a whole number of at least 1")
    return value


def _mla(fields: dict) -> Mla | None:
    if not fields.get("kv_lora_rank"):
        return None
    return Mla(
        q_rank=fields.get("q_lora_rank") or 0,
        kv_rank=fields["kv_lora_rank"],
        nope=fields.get("qk_nope_head_dim", 128),
        rope=fields.get("qk_rope_head_dim", 64),
        value=fields.get("v_head_dim", 128),
    )


def _shared(fields: dict, intermediate: int) -> int:
    count = next((fields[name] for name in _SHARED_COUNT if fields.get(name)), 0)
    size = next((fields[name] for name in _SHARED_SIZE if fields.get(name)), 0)
    return count or -(-size // intermediate)


def _full_attention_every(fields: dict, layers: int) -> int:
    """Layers with another kind of attention, whose memory does not grow, are counted by their names."""
    kinds = fields.get("layer_types")
    if isinstance(kinds, list) and (full := sum(kind in ("full_attention", "attention") for kind in kinds)):
        others = {kind for kind in kinds if "sliding" not in kind and "full" not in kind and kind != "attention"}
        return max(1, layers // full) if others else 1
    return fields.get("full_attention_interval") or 1


def _encoding(whole: dict, fields: dict) -> str:
    said = whole.get("quantization_config") or fields.get("quantization_config")
    if not isinstance(said, dict):
        return "bf16"
    method = str(said.get("quant_method", "")).lower()
    if method == "compressed-tensors":
        return "rawint4" if "'num_bits': 4" in str(said) else "fp8c"
    if method == "modelopt" or "nvfp4" in str(said).lower():
        return "nvfp4"
    return _ENCODINGS.get(method, "bf16")

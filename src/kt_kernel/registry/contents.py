"""What the folder of a model, or its file, holds: from config.json, manifests and headers; no weights are read."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from kt_kernel.convert.folder import MANIFEST
from kt_kernel.weights.config import model_config, model_type_beside
from kt_kernel.weights.detect import Kind, find_method, locate
from kt_kernel.weights.gguf_config import layers_with_experts
from kt_kernel.weights.gguf_files import GgufFiles, holds_gguf
from kt_kernel.weights.gguf_files import find_files as gguf_parts
from kt_kernel.weights.tensor_files import INDEX, parse_json

SAFETENSORS, GGUF, CONVERTED = "safetensors", "gguf", "converted"


@dataclass(frozen=True)
class Contents:
    format: str  # one of the above
    files: int  # with weights
    bytes: int  # of these
    model_type: str | None = None
    experts: int | None = None  # of a layer; None: it has none
    top_k: int | None = None
    layers: int | None = None
    hidden: int | None = None
    method: str | None = None  # that loads the experts as they are stored
    stored_as: str | None = None  # types of a GGUF file's experts, most frequent first
    complete: bool = True
    problem: str | None = None  # why something could not be told

    @property
    def is_moe(self) -> bool:
        return self.experts is not None


def weight_files(path: Path) -> list[Path]:
    """Those that hold weights, in the folder itself. Nothing is opened but a GGUF file's header, to find its parts."""
    if path.is_file():
        return gguf_parts(path) if holds_gguf(path) else [path]
    files = [file for file in path.iterdir() if file.suffix.lower() in (".safetensors", ".gguf") and file.is_file()]
    return sorted([*files, *(file for file in path.glob("_layer_*/**/*.kt") if file.is_file())])


def contents(path: Path) -> Contents:
    """ValueError or OSError where it is no model at all."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: give the folder of a model, or a GGUF file")
    files = weight_files(path)
    if not files:
        raise ValueError(f"{path} has no *.safetensors and no *.gguf: give the folder of a model, or a GGUF file")
    size = sum(file.stat().st_size for file in files)
    try:
        return _told(path, len(files), size)
    except (ValueError, OSError, KeyError) as error:
        kind = GGUF if holds_gguf(path) else SAFETENSORS
        return Contents(kind, len(files), size, problem=" ".join(str(error).split()))


def _told(path: Path, files: int, size: int) -> Contents:
    manifest = path / MANIFEST
    if manifest.is_file():
        said = parse_json(manifest, manifest.read_bytes())
        return _converted(path, files, size, str(said.get("method") or ""), bool(said.get("complete")))
    if holds_gguf(path) and not (path.is_dir() and any(path.glob("*.safetensors"))):
        return _gguf(path, files, size)
    if path.is_dir() and not (path / "config.json").is_file():
        return _without_config(path, files, size)
    return _checkpoint(path, files, size)


def _gguf(path: Path, files: int, size: int) -> Contents:
    with GgufFiles(path) as tensors:
        architecture = tensors.architecture
        types = Counter(tensors.entry(name).type.name.upper() for name in tensors if "_exps" in name)
        moe = bool(layers_with_experts(tensors))
        layers = tensors.field("block_count")
    stored = ", ".join(name for name, _ in types.most_common(3)) or None
    if not moe:
        return Contents(GGUF, files, size, architecture, layers=layers if isinstance(layers, int) else None)
    config = model_config(path)
    return Contents(
        GGUF, files, size, architecture, config.num_experts, config.num_experts_per_tok, config.num_layers,
        config.hidden_size, "LLAMAFILE", stored,
    )  # fmt: skip


def _checkpoint(path: Path, files: int, size: int) -> Contents:
    try:
        config = model_config(path if path.is_dir() else path.parent)
    except ValueError as error:
        if "with experts?" not in str(error):
            raise
        return Contents(SAFETENSORS, files, size, model_type_beside(path), complete=not _missing(path))
    problem = method = kind = None
    for layer in _some_layers(config.moe_layers):
        try:
            kind = locate(path, layer)[0]
            method, problem = find_method(path, layer, config.hidden_size, config.moe_intermediate_size), None
            break
        except (ValueError, OSError, KeyError) as error:
            problem = problem or " ".join(str(error).split())
    form = CONVERTED if kind in (Kind.MERGED, Kind.TREE, Kind.CANONICAL) else SAFETENSORS
    return Contents(
        form, files, size, config.model_type, config.num_experts, config.num_experts_per_tok, config.num_layers,
        config.hidden_size, method, None, not _missing(path), problem,
    )  # fmt: skip


def _some_layers(layers: tuple[int, ...]) -> list[int]:
    """Enough to find one that was downloaded, or converted."""
    return list(dict.fromkeys([layers[0], layers[len(layers) // 2], layers[-1]]))


def _converted(path: Path, files: int, size: int, method: str, complete: bool) -> Contents:
    """Weights that a conversion wrote; config.json is a copy of the source's, where that had one."""
    try:
        config = model_config(path)
    except (ValueError, OSError):
        return Contents(CONVERTED, files, size, method=method, complete=complete)
    return Contents(
        CONVERTED, files, size, config.model_type, config.num_experts, config.num_experts_per_tok, config.num_layers,
        config.hidden_size, method, None, complete,
    )  # fmt: skip


def _without_config(path: Path, files: int, size: int) -> Contents:
    if any(path.glob("_layer_*")) or any(".numa." in name for name in _some_names(path)):
        return Contents(CONVERTED, files, size, problem=f"{path} has no config.json, which would tell the model")
    return Contents(SAFETENSORS, files, size, problem=f"{path} has no config.json: is the download complete?")


def _some_names(path: Path) -> list[str]:
    """Tensors of the first files: all of a conversion are named alike."""
    from kt_kernel.weights.tensor_files import read_header

    return [name for file in sorted(path.glob("*.safetensors"))[:3] for name in read_header(file).tensors]


def _missing(path: Path) -> list[str]:
    """Files that the index names and that are not there."""
    index = path / INDEX
    if not index.is_file():
        return []
    weights = parse_json(index, index.read_bytes()).get("weight_map")
    names = set(weights.values()) if isinstance(weights, dict) else set()
    return sorted(str(name) for name in names if not (path / str(name)).is_file())

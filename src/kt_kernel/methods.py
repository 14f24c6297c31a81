"""The methods of KTMoEWrapper: names that users give to weight formats."""

from kt_kernel.ggml_types import EXPERT_FORMATS

# method -> format of the layer; the first method of a format is the one that messages name.
METHODS = {
    "BF16": "bf16",
    "AMXINT8": "int8",
    "AMXINT4": "int4",
    "INT4G": "int4g",
    # Under these names converted weights of machines without AMX are known; the kernels are the same.
    "MOE_INT8": "int8",
    "MOE_INT4": "int4",
    # These keep codes and scales as a checkpoint has them.
    "FP8": "fp8",
    "FP8_PERCHANNEL": "fp8c",
    "MXFP8": "mxfp8",
    "MXFP4": "mxfp4",
    "NVFP4": "nvfp4",
    "RAWINT4": "rawint4",
    "GPTQ_INT4": "int4z",
    "AWQ": "int4z",
}

# Keeps matrices as a GGUF file has them: the file decides the format of each layer, see ggml_types.py.
LLAMAFILE = "LLAMAFILE"
NAMES = (*METHODS, LLAMAFILE)

# Group size of the methods that keep codes, where no weights are there to tell it; 0: they have no groups.
GROUP_SIZES = {
    "FP8": 128,
    "FP8_PERCHANNEL": 0,
    "MXFP8": 32,
    "MXFP4": 32,
    "NVFP4": 16,
    "RAWINT4": 32,
    "GPTQ_INT4": 128,
    "AWQ": 128,
}
KEPT_FORMATS = frozenset(METHODS[method] for method in GROUP_SIZES)

# int4 with scales in f16, or with zero points, needs int4z; scales that only bf16 holds need rawint4.
_ALSO = {"RAWINT4": ("int4z",), "GPTQ_INT4": ("rawint4",), "AWQ": ("rawint4",)}

DECODING = "method='BF16' (2 bytes a weight), 'AMXINT8' or 'INT4G' (quantised again), which take every encoding"


def check_method(method: object) -> None:
    if not isinstance(method, str) or method not in NAMES:
        raise ValueError(f"method={method!r} is unknown; the methods are {', '.join(NAMES)}")


def format_of(method: object) -> str:
    check_method(method)
    if method == LLAMAFILE:
        raise ValueError(f"method {LLAMAFILE} has no format of its own: a GGUF file decides it")
    return METHODS[method]


def formats_of(method: object) -> tuple[str, ...]:
    """All formats that a layer of this method may have; the checkpoint decides. The usual one comes first."""
    return (format_of(method), *_ALSO.get(method, ()))


def fits(method: object, weight_format: str) -> bool:
    """Whether a layer of this format can be filled by this method."""
    if method == LLAMAFILE:
        return EXPERT_FORMATS.issuperset(weight_format.split("/"))
    return weight_format in formats_of(method)


def method_of(weight_format: str) -> str:
    usual = LLAMAFILE if fits(LLAMAFILE, weight_format) else weight_format
    return next((method for method, name in METHODS.items() if name == weight_format), usual)


def methods_of(weight_format: str) -> list[str]:
    return [method for method, name in METHODS.items() if name == weight_format]


def wrong_method(where: object, found: str, wanted: str) -> ValueError:
    """For weights of the format `found` where a layer needs `wanted`."""
    return ValueError(
        f"{where} was converted for method {method_of(found)} ({found}), but this layer uses method "
        f"{method_of(wanted)} ({wanted}): use method={method_of(found)!r}, or convert the weights again"
    )

"""The methods of KTMoEWrapper: names that users give to weight formats."""

# method -> format of the layer; the first method of a format is the one that messages name.
METHODS = {
    "BF16": "bf16",
    "AMXINT8": "int8",
    "AMXINT4": "int4",
    "INT4G": "int4g",
    # Under these names converted weights of machines without AMX are known; the kernels are the same.
    "MOE_INT8": "int8",
    "MOE_INT4": "int4",
}


def format_of(method: object) -> str:
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"method={method!r} is unknown; the methods are {', '.join(METHODS)}")
    return METHODS[method]


def method_of(weight_format: str) -> str:
    return next((method for method, name in METHODS.items() if name == weight_format), weight_format)


def wrong_method(where: object, found: str, wanted: str) -> ValueError:
    """For weights of the format `found` where a layer needs `wanted`."""
    return ValueError(
        f"{where} was converted for method {method_of(found)} ({found}), but this layer uses method "
        f"{method_of(wanted)} ({wanted}): use method={method_of(found)!r}, or convert the weights again"
    )

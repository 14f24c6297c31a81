"""Names that users give to weight formats."""

# method -> format of the layer
METHODS = {"AMXINT8": "int8", "AMXINT4": "int4", "INT4G": "int4g", "BF16": "bf16"}


def format_of(method: str) -> str:
    if method not in METHODS:
        raise ValueError(f"method {method!r} is unknown; the methods are: {', '.join(METHODS)}")
    return METHODS[method]


def method_of(weight_format: str) -> str:
    return next((method for method, name in METHODS.items() if name == weight_format), weight_format)


def wrong_method(where: object, found: str, wanted: str) -> ValueError:
    """For weights of the format `found` where a layer needs `wanted`."""
    return ValueError(
        f"{where} was converted for method {method_of(found)} ({found}), but this layer uses method "
        f"{method_of(wanted)} ({wanted}): use method={method_of(found)!r}, or convert the weights again"
    )

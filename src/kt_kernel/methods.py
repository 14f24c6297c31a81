"""The methods of KTMoEWrapper: where the weights come from and how they are kept. One line each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    name: str
    format: str  # of the packed experts, a name of ``_core.formats()``


METHODS = {
    method.name: method
    for method in (
        Method("BF16", "bf16"),
        Method("AMXINT8", "int8"),
        Method("AMXINT4", "int4"),
        Method("INT4G", "int4g"),
        # The names under which converted weights of AMD machines are known; the kernels are the same.
        Method("MOE_INT8", "int8"),
        Method("MOE_INT4", "int4"),
    )
}


def method_of(name: object) -> Method:
    """Raises ValueError, with the names that are known."""
    found = METHODS.get(name) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"method={name!r} is unknown; the methods are {', '.join(METHODS)}")
    return found

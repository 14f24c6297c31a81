"""Mixture-of-Experts layers on the CPU.

Importing chooses the instruction set (see ``__cpu_variant__``) and loads nothing but the native core; everything
else is loaded on first use.
"""

from kt_kernel import _core, _variant

__all__ = ["__cpu_variant__", "__version__"]

__version__: str = _core.__version__
__cpu_variant__: str = _variant.select()

# name -> module that holds it
_LAZY: dict[str, str] = {}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'kt_kernel' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})

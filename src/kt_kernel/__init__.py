"""Mixture-of-Experts layers on the CPU.

Importing chooses the instruction set (see ``__cpu_variant__``) and loads nothing but the native core; everything
else is loaded on first use.
"""

import sys
from typing import TYPE_CHECKING

from kt_kernel import _core, _variant, kt_kernel_ext

if TYPE_CHECKING:
    from kt_kernel.placement import generate_gpu_experts_masks
    from kt_kernel.wrapper import KTMoEWrapper

__all__ = ["KTMoEWrapper", "__cpu_variant__", "__version__", "generate_gpu_experts_masks", "kt_kernel_ext"]

__version__: str = _core.__version__
__cpu_variant__: str = _variant.select()

# Clients of the older native module import it by this name.
for _name in ("", ".moe", ".kvcache"):
    sys.modules.setdefault("kt_kernel_ext" + _name, sys.modules["kt_kernel.kt_kernel_ext" + _name])

# name -> module that holds it
_LAZY = {
    "KTMoEWrapper": "kt_kernel.wrapper",
    "generate_gpu_experts_masks": "kt_kernel.placement",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'kt_kernel' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})

"""Simplified Chinese. TEXTS of each module: English text -> Chinese, with the same {names}."""

import importlib
import pkgutil
from functools import lru_cache


def modules() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(__path__)]


@lru_cache(1)
def texts() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in modules():
        found.update(importlib.import_module(f"{__name__}.{name}").TEXTS)
    return found

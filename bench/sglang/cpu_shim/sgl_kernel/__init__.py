"""Stands in for SGLang's GPU kernels where there is no GPU: any name can be imported, none can be called.

SGLang imports many of them whatever the device is, and on the CPU computes in torch where they are missing.
"""

import importlib.abc
import importlib.machinery
import sys

__version__ = "0.0.0"
_OPTIONAL = {"sgl_kernel.scalar_type"}  # SGLang has its own where the import fails


def _absent(module: str):
    def get(name: str):
        if name.startswith("__"):
            raise AttributeError(f"{module}.{name}")

        def call(*_, **__):
            raise NotImplementedError(f"{module}.{name} is a kernel of a GPU, and this machine has none")

        return call

    return get


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("sgl_kernel.") and name not in _OPTIONAL:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module) -> None:
        module.__getattr__ = _absent(module.__name__)


__getattr__ = _absent(__name__)
sys.meta_path.append(_Submodules())

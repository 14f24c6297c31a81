"""``kt version``: what is installed."""

import ctypes
import platform
from importlib import metadata
from typing import Annotated

import typer

import kt_kernel
from kt_kernel import _core
from kt_kernel.cli import printing
from kt_kernel.cli.language import t

# sglang-kt is the fork that earlier versions of kt-kernel needed.
_SGLANG = ("sglang", "sglang-kt")
_PACKAGES = ("torch", "transformers", "huggingface-hub", "safetensors", "gguf", "numpy", "typer", "rich")

EXAMPLES = printing.examples("kt version", "kt version --json")


def version(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Packages, and instruction sets of this CPU.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout instead of text.")] = False,
) -> None:
    """Show what is installed.

    kt-kernel with its CPU variant, Python, CUDA and SGLang.
    """
    cuda, sglang = cuda_version(), next((found for name in _SGLANG if (found := package_version(name))), None)
    system = f"{platform.system()} {platform.release()}"
    if as_json:
        printing.print_json(
            {
                "kt-kernel": kt_kernel.__version__,
                "cpu_variant": kt_kernel.__cpu_variant__,
                "python": platform.python_version(),
                "platform": system,
                "cuda": cuda,
                "sglang": sglang,
                "packages": {name: package_version(name) for name in _PACKAGES},
                "cpu_variants": {variant.name: variant.reason or "runs" for variant in _native()},
            }
        )
        return
    print(f"KTransformers CLI v{kt_kernel.__version__}\n")
    absent = t("not found")
    rows = [
        ("Python", platform.python_version()),
        ("Platform", system),
        ("CUDA", cuda or absent),
        ("kt-kernel", f"{kt_kernel.__version__} ({kt_kernel.__cpu_variant__})"),
        ("sglang", sglang or absent),
    ]
    if verbose:
        rows += [(name, package_version(name) or absent) for name in _PACKAGES]
        rows += [(t("variant {name}", name=variant.name), variant.reason or t("runs here")) for variant in _native()]
        rows.append((t("module"), _core.__file__))
    printing.facts(rows)


def _native() -> list["_core.Variant"]:
    return [variant for variant in _core.variants() if not variant.emulated]


def package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def cuda_version() -> str | None:
    """Of the driver: what it runs, not what is installed beside it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        number = ctypes.c_int()
        if driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"

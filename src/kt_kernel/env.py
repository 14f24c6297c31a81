"""Every environment variable that kt-kernel reads, each as one typed function."""

import os


def cpu_variant() -> str | None:
    """KT_KERNEL_CPU_VARIANT: the instruction set to use, ``avx512`` for the best AVX-512 one; unset for the best."""
    return os.environ.get("KT_KERNEL_CPU_VARIANT", "").strip() or None


def debug() -> bool:
    """KT_KERNEL_DEBUG: 1 prints how the instruction set was chosen, on stderr."""
    return os.environ.get("KT_KERNEL_DEBUG", "").strip().lower() in {"1", "on", "true", "yes"}

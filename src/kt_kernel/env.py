"""Every environment variable that kt-kernel reads, each as one typed function."""

import os


def cpu_variant() -> str | None:
    """KT_KERNEL_CPU_VARIANT: the instruction set to use, ``avx512`` for the best AVX-512 one; unset for the best."""
    name = os.environ.get("KT_KERNEL_CPU_VARIANT", "").strip()
    # Bytes that are no text are shown as such: the core takes text only, and an import may end with ImportError only.
    return name.encode(errors="backslashreplace").decode() or None


def debug() -> bool:
    """KT_KERNEL_DEBUG: 1 prints how the instruction set was chosen, and why kept weights are made again, on stderr."""
    return _is_on("KT_KERNEL_DEBUG")


def skip_gpu_experts() -> bool:
    """KT_KERNEL_SKIP_GPU_EXPERTS: 1 keeps experts that are on the GPU out of the CPU's memory."""
    return _is_on("KT_KERNEL_SKIP_GPU_EXPERTS")


def weight_store() -> str | None:
    """KT_KERNEL_WEIGHT_STORE: the folder where packed weights are kept for the next start; unset for none."""
    return os.environ.get("KT_KERNEL_WEIGHT_STORE", "").strip() or None


def record_experts() -> str | None:
    """KT_KERNEL_RECORD_EXPERTS: the .pt file that gets how often prompts used each expert; unset for none."""
    return os.environ.get("KT_KERNEL_RECORD_EXPERTS", "").strip() or None


def api_key() -> str | None:
    """KT_KERNEL_API_KEY: the key that ``kt run`` asks clients for; unset for none."""
    return os.environ.get("KT_KERNEL_API_KEY", "").strip() or None


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in {"1", "on", "true", "yes"}

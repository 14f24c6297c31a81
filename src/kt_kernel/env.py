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


def cuda_visible_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES: the GPUs that CUDA leaves to this process; unset for all, empty for none."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def home() -> str | None:
    """KT_KERNEL_HOME: one folder for settings, models and caches; unset for those of the platform."""
    return os.environ.get("KT_KERNEL_HOME", "").strip() or None


def language() -> str | None:
    """KT_LANG: the language of ``kt``, en or zh, also as in zh_CN.UTF-8; unset for that of the settings."""
    return os.environ.get("KT_LANG", "").strip() or None


def system_language() -> str | None:
    """LC_ALL, LC_MESSAGES or LANG: the language of the system."""
    return next((value for name in ("LC_ALL", "LC_MESSAGES", "LANG") if (value := os.environ.get(name))), None)


def no_color() -> bool:
    """NO_COLOR: anything but nothing keeps colours out of what ``kt`` prints (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


def hub_cache() -> str | None:
    """HF_HUB_CACHE, or hub in HF_HOME: where huggingface_hub keeps models; unset for its usual place."""
    if cache := os.environ.get("HF_HUB_CACHE", "").strip():
        return cache
    if folder := os.environ.get("HF_HOME", "").strip():
        return os.path.join(folder, "hub")
    folder = os.environ.get("XDG_CACHE_HOME", "").strip()
    return os.path.join(folder, "huggingface", "hub") if folder else None


def hub_endpoint() -> str | None:
    """HF_ENDPOINT: the address that huggingface_hub takes instead of huggingface.co."""
    return os.environ.get("HF_ENDPOINT", "").strip() or None


def conda() -> str | None:
    """CONDA_PREFIX: the conda environment that this process runs in; unset for none."""
    return os.environ.get("CONDA_PREFIX") or None


def proxies() -> dict[str, str]:
    """HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, in small letters too: what clients send through a proxy."""
    names = [name for kind in ("http_proxy", "https_proxy", "all_proxy") for name in (kind, kind.upper())]
    return {name: value for name in names if (value := os.environ.get(name, "").strip())}


def no_proxy() -> str:
    """NO_PROXY or no_proxy: hosts that clients reach without a proxy, separated by commas."""
    return os.environ.get("no_proxy", "").strip() or os.environ.get("NO_PROXY", "").strip()


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in {"1", "on", "true", "yes"}

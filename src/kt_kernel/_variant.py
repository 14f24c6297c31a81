"""The choice of an instruction set at import."""

import sys
from contextlib import suppress

from kt_kernel import _core, env


def select() -> str:
    """Activate the best variant, or the one that KT_KERNEL_CPU_VARIANT names, and return its name.

    Raises ImportError where none can run: callers that make kt_kernel optional guard exactly that.
    """
    forced = env.cpu_variant()
    log = _log if env.debug() else lambda line: None
    log(f"CPU features: {_core.cpu_features() or 'none above the x86-64 baseline'}")
    for variant in _core.variants():
        log(f"variant {variant.name}: {'runs here' if variant.runnable else variant.reason}")
    log(f"KT_KERNEL_CPU_VARIANT={forced or '(not set: the best one)'}")
    name = _core.select_variant(forced)
    if forced is None and name != (best := _core.choose_variant()):
        log(f"passed over {best}: the operating system refused its registers")
    log(f"selected {name} from {_core.__file__}")
    return name


def _log(line: str) -> None:
    with suppress(OSError, ValueError):  # a stderr that is closed is no reason to fail
        print(f"[kt-kernel] {line}", file=sys.stderr)

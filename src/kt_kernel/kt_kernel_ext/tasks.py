"""What CPUInfer.submit takes."""

from collections.abc import Callable

from kt_kernel import _core

Task = _core.ForwardTask | Callable[[], None]

"""What CPUInfer.submit takes."""

from collections.abc import Callable

from kt_kernel import _core

Task = _core.ForwardTask | _core.WriteSlicesTask | Callable[[], None]

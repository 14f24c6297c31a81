"""The table of tolerances is kt_kernel.verify.limits; here is what tests run over."""

from kt_kernel import _core
from kt_kernel.ggml_types import EXPERT_FORMATS
from kt_kernel.verify.limits import LIMITS, Limit, act_kind

__all__ = ["FORMATS", "LIMITS", "RUNNABLE", "VARIANTS", "Limit", "act_kind"]

VARIANTS = {variant.name: variant for variant in _core.variants()}
# Without those that only GGUF files have: test_gguf_layers.py.
FORMATS = [name for name in _core.formats() if name not in EXPERT_FORMATS or name in ("bf16", "mxfp4")]
RUNNABLE = [name for name, variant in VARIANTS.items() if variant.runnable]

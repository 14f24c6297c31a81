"""The transformers plugin: a model whose experts run on our kernels.

AutoModelForCausalLM.from_pretrained(path, quantization_config=KTConfig(...)). Importing this registers the experts
function, the quantizer and the quantization config, all under the name "kt".
"""

import transformers

# Before, quantizers do not tell how what they store is decoded: checkpoints that are quantised would load wrong.
_NEEDED = (5, 21)

if tuple(map(int, transformers.__version__.split(".")[:2])) < _NEEDED:
    needed = ".".join(map(str, _NEEDED))
    raise ImportError(
        f"kt_kernel.hf needs transformers {needed} or later, and found {transformers.__version__}: "
        f"pip install 'transformers>={needed},<6'"
    )

from kt_kernel.hf.config import KTConfig  # noqa: E402
from kt_kernel.hf.registration import register  # noqa: E402

__all__ = ["KTConfig"]

register()

"""The transformers plugin: a model whose experts run on our kernels.

AutoModelForCausalLM.from_pretrained(path, quantization_config=KTConfig(...)). Importing this registers the experts
function, the quantizer and the quantization config, all under the name "kt".
"""

from kt_kernel.hf.config import KTConfig
from kt_kernel.hf.registration import register

__all__ = ["KTConfig"]

register()

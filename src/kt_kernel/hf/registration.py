"""Makes the plugin known to transformers."""

from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AutoHfQuantizer,
    register_quantization_config,
    register_quantizer,
)

from kt_kernel.hf.config import NAME, KTConfig
from kt_kernel.hf.forward import kt_experts_forward
from kt_kernel.hf.quantizer import KTQuantizer


def register() -> None:
    if NAME in AUTO_QUANTIZATION_CONFIG_MAPPING:  # twice is an error there
        return
    ALL_EXPERTS_FUNCTIONS.register(NAME, kt_experts_forward)
    register_quantization_config(NAME)(KTConfig)
    register_quantizer(NAME)(KTQuantizer)
    _let_our_config_win()


def _let_our_config_win() -> None:
    """Of a checkpoint that is quantised already: transformers refuses a config of another class than the checkpoint's,
    and asks nobody. Every other pair of configs is still its own affair.
    """
    merge = AutoHfQuantizer.merge_quantization_configs.__func__

    def merge_quantization_configs(cls, quantization_config, quantization_config_from_args):
        given = quantization_config_from_args
        if isinstance(given, KTConfig) or (isinstance(given, dict) and given.get("quant_method") == NAME):
            return given
        return merge(cls, quantization_config, quantization_config_from_args)

    AutoHfQuantizer.merge_quantization_configs = classmethod(merge_quantization_configs)

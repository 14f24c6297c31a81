"""Where the weights of experts come from: checkpoints, converted files, tensors in memory."""

from kt_kernel.weights.config import ModelConfig, model_config
from kt_kernel.weights.detect import find_method
from kt_kernel.weights.loading import load_layer, load_layer_from_tensors, save_layer
from kt_kernel.weights.tensor_files import MissingTensorError
from kt_kernel.weights.traits import Traits, choose_format, choose_traits

__all__ = [
    "MissingTensorError",
    "ModelConfig",
    "Traits",
    "choose_format",
    "choose_traits",
    "find_method",
    "load_layer",
    "load_layer_from_tensors",
    "model_config",
    "save_layer",
]

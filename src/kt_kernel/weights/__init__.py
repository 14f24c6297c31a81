"""Where the weights of experts come from: checkpoints, converted files, tensors in memory."""

from kt_kernel.weights.config import ModelConfig, model_config
from kt_kernel.weights.detect import find_method
from kt_kernel.weights.loading import load_layer, load_layer_from_tensors, save_layer
from kt_kernel.weights.tensor_files import MissingTensorError

__all__ = [
    "MissingTensorError",
    "ModelConfig",
    "find_method",
    "load_layer",
    "load_layer_from_tensors",
    "model_config",
    "save_layer",
]

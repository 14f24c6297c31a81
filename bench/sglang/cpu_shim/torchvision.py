"""torchvision of PyPI, whose operators want a CUDA build, beside a CPU build of torch: it lacks two names.

SGLang imports torchvision for models with images. This declares them, then puts the real package in its own place.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

import torch

if torch.version.cuda is None:
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

_elsewhere = [folder for folder in sys.path if Path(folder).resolve() != Path(__file__).resolve().parent]
_spec = importlib.machinery.PathFinder.find_spec("torchvision", _elsewhere)
if _spec is None:
    raise ModuleNotFoundError("No module named 'torchvision'", name="torchvision")
_real = importlib.util.module_from_spec(_spec)
sys.modules["torchvision"] = _real
_spec.loader.exec_module(_real)

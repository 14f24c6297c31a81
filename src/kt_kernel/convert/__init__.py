"""Converts the experts of a checkpoint to files for the CPU: layer by layer, resumable, with a report of errors."""

from kt_kernel.convert.engine import Outcome, Settings, convert
from kt_kernel.convert.errors import ConvertError

__all__ = ["ConvertError", "Outcome", "Settings", "convert"]

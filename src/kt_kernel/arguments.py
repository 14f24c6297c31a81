"""Checks of arguments: what is raised names the argument, what it is, and what it may be."""

import numbers


def whole_number(name: str, value: object, least: int, most: int | None = None, of: str = "") -> int:
    """An int of Python, numpy or torch in least..most; ``of`` names the argument that ``most`` comes from."""
    legal = f"{least} or more" if most is None else f"{least}..{most}{f' ({of})' if of else ''}"
    if isinstance(value, bool) or not (isinstance(value, numbers.Integral) or _is_scalar_of_torch(value)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; pass an int, {legal}")
    number = int(value)
    if number < least or (most is not None and number > most):
        raise ValueError(f"{name}={number} is not in {legal}" if most is not None else f"{name}={number}; pass {legal}")
    return number


def _is_scalar_of_torch(value: object) -> bool:
    if not hasattr(value, "is_floating_point"):  # no tensor: torch need not be loaded
        return False
    return value.dim() == 0 and not value.is_floating_point() and str(value.dtype) != "torch.bool"

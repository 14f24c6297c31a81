"""Sizes of groups, which files do not name: they follow from how many groups a length has."""

from kt_kernel.weights.encodings.stored import Stored


def _power_of_two(length: int, count: int) -> int | None:
    """2^i with ceil(length / 2^i) == count. Two of them only where both are at least the length."""
    size = 1
    while -(-length // size) > count:
        size *= 2
    return size if -(-length // size) == count else None


def block_size(length: int, count: int, stored: Stored, axis: int) -> int:
    """Blocks are powers of two, 128 as a rule; the last may be ragged."""
    size = _power_of_two(length, count) if count else None
    if size is None:
        raise stored.wrong(
            f"ceil({length} / b) for a block size b, a power of two, in dimension {axis} (128: {-(-length // 128)})"
        )
    return size


def shared_size(length: int, count: int, size: int) -> int:
    """The size of a group, or of one that is the only one, the least power of two that holds it."""
    return size if count > 1 else 1 << max(5, (length - 1).bit_length())


def group_size(length: int, count: int, stored: Stored, axis: int) -> int:
    """Groups divide the length, or are a power of two and the last one ragged: one of these may explain the count."""
    sizes = {length // count} if count and length % count == 0 else set()
    ragged = _power_of_two(length, count) if count > 1 else None
    sizes |= {ragged} - {None}
    if len(sizes) != 1:
        found = f"{count} groups of {length} weights may have {' or '.join(map(str, sorted(sizes)))}" if sizes else ""
        raise stored.wrong(
            f"ceil({length} / g) groups in dimension {axis}, with one group size g that explains them"
            + (f" ({found})" if found else "")
        )
    return sizes.pop()

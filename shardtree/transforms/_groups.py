"""An axis as equal groups, one after the other: how many there are, and where each begins."""

from __future__ import annotations

from ..errors import ShapeError, error_text
from ..geometry import integer


def checked_groups(doing: str, groups: int) -> int:
    """Return how many groups there are.

    Raises:
        MetadataError: it isn't an int.
        ShapeError: it is less than 1.

    Examples:
        >>> checked_groups("split_tensor", 4)
        4
    """
    count = integer(doing, "groups", groups)
    if count < 1:
        raise ShapeError(error_text(f"{doing}: groups", found=count, expected="1 or more"))
    return count


def group_starts(length: int, groups: int) -> list[int]:
    """Return where each of some equal groups begins along an axis of this length.

    Examples:
        >>> group_starts(12, 3), group_starts(0, 2)
        ([0, 4, 8], [0, 0])
    """
    return [number * (length // groups) for number in range(groups)]

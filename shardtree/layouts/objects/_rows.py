"""Rules that join values along their first axis: everybody gets all, or it is dealt out again in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import torch

from ...errors import UnsupportedValue, error_text
from ...trees import join_data
from ._array import ObjectArray, Shape, cell_count


def concatenate_objects(array: ObjectArray, shape: Shape) -> Sequence[Any]:
    """Return all values joined along their first axis, in row-major order, for every cell: a rule.

    Args:
        array: its values are lists, tuples, texts, bytes, tensors or numpy arrays, all of one kind. Dicts
            aren't joined: see `rules_by_field`.
        shape: of the target, in objects.

    Raises:
        UnsupportedValue: values can't be joined.

    Examples:
        >>> concatenate_objects(ObjectArray("seen", (2,), ([1, 2], [3])), (1,))
        [[1, 2, 3]]
    """
    return [_joined("concatenate_objects", array)] * cell_count(shape)


def redistribute_objects(array: ObjectArray, shape: Shape) -> Sequence[Any]:
    """Return all values joined along their first axis and dealt out again in order: a rule.

    Sizes are as even as can be: where they aren't equal, the first cells get one more.

    Args:
        array: its values are as for `concatenate_objects`.
        shape: of the target, in objects.

    Raises:
        UnsupportedValue: values can't be joined.

    Examples:
        >>> redistribute_objects(ObjectArray("buffer", (2,), ([1, 2, 3], [4, 5])), (3,))
        [[1, 2], [3, 4], [5]]
    """
    joined = _joined("redistribute_objects", array)
    each, more = divmod(len(joined), cell_count(shape))
    sizes = (each + (position < more) for position in range(cell_count(shape)))
    bounds = pairwise(accumulate(sizes, initial=0))
    return [joined[start:stop] for start, stop in bounds]


def _joined(doing: str, array: ObjectArray) -> Any:
    first = array.values[0]
    wrong = [
        f"{array.told(position)}: {_kind(value)}"
        for position, value in enumerate(array.values)
        if _kind(value) != _kind(first)
    ]
    if wrong:
        what = f"{doing}: values of different kinds can't be joined"
        raise UnsupportedValue(error_text(what, expected=f"{_kind(first)}, as {array.told(0)}", offenders=wrong))
    join = _JOINS.get(type(first))
    if join is None or (isinstance(first, (torch.Tensor, np.ndarray)) and not first.ndim):
        expected = ", ".join(kind.__name__ for kind in _JOINS) + ", with at least one axis"
        fix = "Use rules_by_field for dicts, fold_objects for numbers, or a function of your own."
        raise UnsupportedValue(
            error_text(f"{doing}: {array.key!r} can't be joined", found=_kind(first), expected=expected, fix=fix)
        )
    return join(array.values)


def _kind(value: Any) -> str:
    """Return what values have to have in common to be joined."""
    name = type(value).__name__
    if not isinstance(value, (torch.Tensor, np.ndarray)):
        return name
    rows = f"rows of shape {tuple(value.shape[1:])}" if value.ndim else "without axes"
    device = f" on {value.device}" if isinstance(value, torch.Tensor) else ""
    return f"{name}, {value.dtype}{device}, {rows}"


_JOINS: dict[type, Callable[[Sequence[Any]], Any]] = {
    list: lambda values: list(chain.from_iterable(values)),
    tuple: lambda values: tuple(chain.from_iterable(values)),
    str: "".join,
    bytes: b"".join,
    torch.Tensor: lambda values: join_data(torch.cat, values, 0),
    np.ndarray: np.concatenate,
}

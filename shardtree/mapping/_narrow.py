"""What narrowing leaves of a shard: the smaller box, and the pieces of data that lie in it."""

from __future__ import annotations

from typing import Any

from ..errors import ShapeError
from ..geometry import narrow_axis, narrow_flat_range, refuse

Shape = tuple[int, ...]


def narrowed_box(
    subject: str, local_shape: Shape, global_shape: Shape, offset: Shape, dim: int, length: int
) -> tuple[Shape, Shape, Shape]:
    """Return local shape, global shape and offset once every box of a grid keeps `length` indices along `dim`.

    Args:
        subject: what errors are about.
        local_shape: the box's shape, without the prepended axes.
        global_shape: the global tensor's, with them.
        offset: the box's first index along each global axis.
        dim: an axis of `local_shape`.
        length: how many indices are kept.

    Raises:
        ShapeError: the grid is irregular along `dim`.

    Examples:
        >>> narrowed_box("narrow 'w'", (4, 2), (32, 2), (12, 0), 0, 1)
        ((1, 2), (8, 2), (3, 0))
    """
    axis, size = dim + len(global_shape) - len(local_shape), local_shape[dim]
    return (
        (*local_shape[:dim], length, *local_shape[dim + 1 :]),
        narrow_axis(subject, "global_shape", global_shape, axis, size, length),
        narrow_axis(subject, "global_offset", offset, axis, size, length),
    )


def narrowed_pieces(
    subject: str, data: Any, local_shape: Shape, flat: slice | None, dim: int, start: int, length: int
) -> list[tuple[Any, slice | None]]:
    """Return what is left of a shard's data, as views, each with its flat range of the narrowed box.

    Args:
        subject: what errors are about.
        data: something with a `narrow` method, or None.
        local_shape: the box's shape before narrowing.
        flat: the range of the flattened box that `data` is; None where it is the box.
        dim: the axis to narrow.
        start: the first index to keep.
        length: how many indices to keep.

    Examples:
        >>> narrowed_pieces("narrow 'w'", None, (2, 4), slice(1, 8), 1, 2, 2)
        [(None, slice(0, 2, None)), (None, slice(2, 4, None))]
    """
    if flat is None:
        return [(_narrow_data(subject, data, dim, start, length), None)]
    runs = narrow_flat_range(local_shape, flat.start, flat.stop, dim, start, length)
    return [(_narrow_data(subject, data, 0, part.start, part.stop - part.start), run) for part, run in runs]


def _narrow_data(subject: str, data: Any, dim: int, start: int, length: int) -> Any:
    if data is not None and not hasattr(data, "narrow"):
        fix = "Narrow `shard.without_data()` if only metadata matters."
        refuse(subject, "data", type(data).__name__, "a tensor or None", fix, error=ShapeError)
    return None if data is None else data.narrow(dim, start, length)

"""Gathers by known indices: each run of consecutive indices becomes a move, and repetitive moves are joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ..core.lazy import dense
from ._arguments import mapped, tensors_in
from ._cells import Cells, Tracer
from ._moves import Moves, in_place, read_of, rolled, through
from ._steps import number, operator_name
from ._writes import copy_into, put

Array = np.ndarray[Any, Any]
Rule = Callable[..., torch.Tensor]
"""Function that records an operation, called with the record, the operator and its arguments."""

MOST_NUMBERS = 1 << 26
"""Upper bound of a tensor's elements for operations other than gathers along one axis, which number them all."""
_INDICES = {"index", "indices", "mask", "repeats"}
"""Names of the arguments of torch's operations that are indices."""
_INSTEAD = {
    **dict.fromkeys(("masked_fill", "masked_fill_"), "Write torch.where(mask, value, tensor) instead."),
    **dict.fromkeys(
        ("scatter", "scatter_", "gather", "index_copy_", "index_select", "index_put_", "index"),
        "Use an index that is not read from the checkpoint, such as torch.arange or a list of numbers.",
    ),
}
"""Advice for operations whose index is made of sources."""


# Indices must be known.


def known(
    record: Cells, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return an operation's positional and keyword arguments, with all indices as ordinary tensors on the CPU.

    Raises:
        TraceError: an index is computed from inputs of the traced code, or has unknown elements.
    """
    places = zip(func._schema.arguments, args, strict=False)
    take = partial(_known, record, func)
    new = [mapped(take, value) if argument.name in _INDICES else value for argument, value in places]
    return tuple(new), {word: mapped(take, value) if word in _INDICES else value for word, value in kwargs.items()}


def _known(record: Cells, func: Any, index: Any) -> Any:
    if not isinstance(index, torch.Tensor):
        return index
    if (value := record.known_value(index)) is not None:
        return value
    cell = record.find_cell(index)  # an index on meta that was written to is a tracer by now
    is_from_meta = cell is not None and cell.keep is not None and cell.keep.device.type == "meta"
    if record.is_blank(index) or (is_from_meta and not record.has_sources(index)):
        record.refuse_meta("an index")
    return record.refuse("an index", [index], instead=_INSTEAD.get(operator_name(func)))


# Gathers along one axis, which don't number the elements.


def runs(index: Array) -> list[tuple[int, int, int]]:
    """Return (position, first index, count) of each run of consecutive indices."""
    edges = np.flatnonzero(np.diff(index, prepend=-9, append=-9) != 1)
    return list(zip(edges[:-1].tolist(), index[edges[:-1]].tolist(), np.diff(edges).tolist(), strict=True))


def _regular(index: Array) -> list[tuple[int, int]] | None:
    """Return an index as nested loops (count, step), outermost first; None if it does not consist of such loops.

    The index ``[3, 4, 7, 8]`` begins at 3 and has the loops ``[(2, 4), (2, 1)]``.
    """
    loops: list[tuple[int, int]] = []
    while len(index) > 1:
        step = int(index[1] - index[0])
        ends = np.flatnonzero(np.diff(index) != step)
        count = int(ends[0]) + 1 if len(ends) else len(index)
        if step < 0 or len(index) % count:
            return None
        rows = index.reshape(-1, count)
        if not (rows == rows[:, :1] + step * np.arange(count)).all():
            return None
        loops.append((count, step))
        index = rows[:, 0]
    return loops[::-1]


def _is_mask(index: torch.Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _positions(index: torch.Tensor, length: int) -> Array:
    """Return an index tensor or a mask as positions along an axis, all counted from the front."""
    with torch._C._DisableTorchDispatch():
        positions = index.nonzero() if _is_mask(index) else index
        places: Array = positions.reshape(-1).numpy().astype(np.int64)
    if places.size and not (-length <= places.min() and places.max() < length):
        raise IndexError(f"index {places.min()} to {places.max()} is out of bounds for an axis of {length}")
    return places % max(1, length)  # negative ones count from the end


def only_axis(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> int | None:
    """Return the indexed axis, if there is one int32 or int64 index, or one mask of a single axis; otherwise None."""
    [(dim, index), *others] = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if _is_mask(index):
        is_plain = index.shape == tensor.shape[dim : dim + 1]
    else:
        is_plain = index.dtype in (torch.int32, torch.int64)
    return dim if is_plain and not others else None


def gather(record: Cells, tensor: torch.Tensor, dim: int, index: Array) -> Tracer:
    """Record a gather at non-negative positions along an axis, and return its result."""
    view: torch.Tensor = tensor.meta if isinstance(tensor, Tracer) else tensor
    shape = (*view.shape[:dim], len(index), *view.shape[dim + 1 :])
    new = record.fresh(torch.empty(shape, dtype=view.dtype, device="meta"))
    outer, strides, start = new.meta.stride(), view.stride(), int(view.storage_offset())
    loops = _regular(index) if len(index) else []
    if loops is None:
        reads = [
            read_of(
                start + first * strides[dim],
                (*shape[:dim], count, *shape[dim + 1 :]),
                outer,
                strides,
                place * outer[dim],
            )
            for place, first, count in runs(index)
        ]
    else:
        counts = [count for count, _ in loops]
        sizes = (*shape[:dim], *counts, *shape[dim + 1 :])
        into = (*outer[:dim], *(step * outer[dim] for step in dense(tuple(counts)).stride), *outer[dim + 1 :])
        steps = (*strides[:dim], *(step * strides[dim] for _, step in loops), *strides[dim + 1 :])
        reads = [read_of(start + int(index[0]) * strides[dim], sizes, into, steps)] if len(index) else []
    cell = record.cell(tensor)
    cell.used += reads
    moves = rolled(cell.writes.find(rolled(reads))[0])
    put(record, new, list(through(moves, record.seen(cell, view))))
    return new


def positions_along(
    tensor: torch.Tensor, indices: Sequence[torch.Tensor | None], dim: int
) -> tuple[Array, tuple[int, ...]]:
    """Return the positions that ``indices[dim]`` selects along axis `dim`, and the shape that replaces this axis.

    The positions are flat and not negative. The shape is that of the index tensor; a mask gives a single axis, with the
    number of positions.
    """
    index: Any = indices[dim]
    positions = _positions(index, tensor.shape[dim])
    return positions, (len(positions),) if _is_mask(index) else tuple(index.shape)


def _index_select(record: Cells, func: Any, tensor: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    # torch refuses masks and negative positions here, with its own error.
    size = tensor.shape[dim] if tensor.ndim else 0
    if index.ndim > 1 or _is_mask(index) or bool(((index < 0) | (index >= size)).any()):
        return _by_number(record, func, tensor, dim, index)
    dim %= max(1, tensor.ndim)
    return gather(record, tensor, dim, _positions(index, tensor.shape[dim]))


def _index(record: Cells, func: Any, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    if (dim := only_axis(tensor, indices)) is None:
        return _by_number(record, func, tensor, indices)
    positions, inner = positions_along(tensor, indices, dim)
    return gather(record, tensor, dim, positions).reshape((*tensor.shape[:dim], *inner, *tensor.shape[dim + 1 :]))


# Gathers by number: an operation moves the elements' numbers as it moves the elements.


def check_numbers(record: Cells, func: Any, tensor: torch.Tensor) -> None:
    """Raise if a tensor has too many elements for an operation that is recorded by numbering them."""
    if tensor.numel() > MOST_NUMBERS:
        why = f"this operation is recorded for tensors of at most {MOST_NUMBERS} elements"
        record.refuse(operator_name(func), [tensor], why=why)


def _by_number(record: Cells, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Record an operation that moves elements or fills with zeros.

    Torch applies the operation to a tensor of the elements' indices. The result shows where each element went.
    """
    if others := [tensor for tensor in tensors_in(args, kwargs) if isinstance(tensor, Tracer)]:
        record.refuse(operator_name(func), others)
    check_numbers(record, func, tensor)
    with torch._C._DisableTorchDispatch():
        # Numbers begin at 1, since operations fill with zeros; float64 is a dtype that all of them accept.
        numbers = torch.arange(1, tensor.numel() + 1, device="cpu", dtype=torch.float64).reshape(tensor.shape)
        result = func(numbers, *args, **kwargs)
        index = result.reshape(-1).numpy().astype(np.int64) - 1
    new = record.fresh(torch.empty(result.shape, dtype=tensor.dtype, device="meta"))
    flat = Moves(record.reads(tensor, dense(tuple(tensor.shape)).stride))
    reads = [read_of(first, (count,), (1,), (1,), place) for place, first, count in runs(index) if first >= 0]
    if (index < 0).any():
        copy_into(record, new, number(0, tensor.dtype))
    reads = rolled(reads)
    record.exchange(new, list(map(in_place, reads)), flat.find(reads)[0])
    return new


def _gathering(rule: Rule) -> Rule:
    """Return a rule that first replaces indices by ordinary tensors (see `known`), and then calls the given rule.

    If no argument is traced then, the operation is executed instead of recorded.
    """

    def gathering(record: Cells, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        args, kwargs = known(record, func, args, kwargs)
        if not any(isinstance(each, Tracer) for each in tensors_in(args, kwargs)):
            constant: torch.Tensor = func(*args, **kwargs)
            return constant
        return rule(record, func, *args, **kwargs)

    return gathering


_GATHERS = ("gather", "take", "rot90", "repeat_interleave", "tril", "triu", "take_along_dim", "masked_select")
_SHUFFLES = ("channel_shuffle", "pixel_shuffle", "pixel_unshuffle", "im2col")
RULES: dict[str, Rule] = {
    **dict.fromkeys((*_GATHERS, *_SHUFFLES), _gathering(_by_number)),
    "index": _gathering(_index),
    "index_select": _gathering(_index_select),
}
"""Functions that record operations, by operator's name."""

"""Writes to tensors, recorded as moves (`Move`): to all of a view, as ``copy_`` does, or to any flat indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..core.lazy import dense
from ._arguments import is_ordinary
from ._cells import Cells, Tracer
from ._moves import Move, Moves, in_place, is_nested, read_of, rolled, through
from ._steps import cast

_EXPANDED = "elements of the view share a place in memory, as in an expanded tensor: torch writes only to a clone"
_TWICE = "several elements are written to one place, and torch leaves open which of them stays"
_OVERLAP = """its source and its destination overlap in memory, where torch raises an error, or the result depends on
  the order in which it copies"""


def copy_into(
    record: Cells, into: torch.Tensor, tensor: torch.Tensor, via: tuple[Any, ...] = (), *, keeps: bool = False
) -> None:
    """Record a ``copy_``, which broadcasts and casts.

    Args:
        record: Record of the run.
        into: Destination.
        tensor: Source.
        via: Casts and functions that the elements pass through; () for a cast to the destination's dtype.
        keeps: Whether the new values are computed from the old ones. If so, the old ones don't count as overwritten.
    """
    view = into.meta if isinstance(into, Tracer) else into
    tensor = tensor if tensor.shape == view.shape else tensor.expand(view.shape)
    via = via or cast(tensor.dtype, view.dtype)
    if (hole := _hole_of(view)) is None:
        _write_apart(record, into, tensor, via, keeps=keeps)
    else:
        moves = through(record.reads(tensor, view.stride(), int(view.storage_offset())), via)
        record.exchange(into, [hole], moves, keeps=keeps)


def check_apart(
    record: Cells, name: str, into: torch.Tensor, tensors: Sequence[torch.Tensor], *, may_be_same: bool = True
) -> None:
    """Raise if an operation reads elements that it also writes: torch's order of copying would decide the result.

    Args:
        record: Record of the run.
        name: Name of the operation.
        into: Destination.
        tensors: Tensors that the operation reads.
        may_be_same: Whether a tensor may be the very view that is written, as in elementwise operations.

    Raises:
        TraceError: a tensor overlaps with the destination in memory.
    """
    for tensor in tensors:
        # An expanded destination is refused elsewhere, with its own message.
        if not _share_memory(record, into, tensor) or _is_expanded(into):
            continue
        if may_be_same and _is_same_view(into, tensor):
            continue
        if Moves([_places_read(into)]).find([_places_read(tensor)])[0]:
            record.refuse(name, [into, tensor], why=_OVERLAP)


def _share_memory(record: Cells, into: torch.Tensor, tensor: torch.Tensor) -> bool:
    new = [view.cell for view in (into, tensor) if isinstance(view, Tracer) and view.cell.keep is None]
    if new:  # without an ordinary storage, as sources are
        return len(new) == 2 and new[0] is new[1]
    if not (is_ordinary(into) or isinstance(into, Tracer)) or not (is_ordinary(tensor) or isinstance(tensor, Tracer)):
        return False
    left, right = (view.cell.keep if isinstance(view, Tracer) else view.untyped_storage() for view in (into, tensor))
    return bool(left._cdata == right._cdata)


def _is_same_view(into: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether two tensors of one storage are the same view: elements at equal positions share memory."""
    if tensor.storage_offset() != into.storage_offset() or tensor.shape != into.shape:
        return False
    strides = zip(into.shape, into.stride(), tensor.stride(), strict=True)
    return all(size == 1 or step == other for size, step, other in strides)


def _places_read(view: torch.Tensor) -> Move:
    """Return a view's flat indices in the storage, each once, encoded as a move from each index to itself."""
    place, pairs = int(view.storage_offset()), zip(view.shape, view.stride(), strict=True)
    loops = [(size, step) for size, step in pairs if step or not size]
    sizes, steps = [size for size, _ in loops], [step for _, step in loops]
    return read_of(place, sizes, steps, steps, place)


def put(record: Cells, into: torch.Tensor, moves: Sequence[Move]) -> None:
    """Record that moves write all elements of a view. If there are no moves, the elements count as never written."""
    if (hole := _hole_of(into.meta if isinstance(into, Tracer) else into)) is None:
        record.refuse("writing", [into], why=_EXPANDED)
    record.exchange(into, [hole], moves)


def places_of(view: torch.Tensor) -> torch.Tensor:
    """Return the flat index in the storage of each element of a view, as an int64 tensor of the view's shape."""
    places = torch.full((1,) * view.ndim, int(view.storage_offset()), device="cpu")
    for dim, (size, step) in enumerate(zip(view.shape, view.stride(), strict=True)):
        steps = torch.arange(size, device="cpu") * step
        places = places + steps.reshape([-1 if axis == dim else 1 for axis in range(view.ndim)])
    return places


def _is_expanded(view: torch.Tensor) -> bool:
    return any(size > 1 and not step for size, step in zip(view.shape, view.stride(), strict=True))


def _hole_of(view: torch.Tensor) -> Move | None:
    """Return a view's flat indices in the storage, encoded as a move from each index to itself.

    None if axes of the view interleave or overlap in memory, so that the move isn't nested (`is_nested`).
    """
    place, stride = int(view.storage_offset()), view.stride()
    hole = read_of(place, view.shape, stride, stride, place)
    return hole if is_nested(hole) or not view.numel() else None


def _write_apart(
    record: Cells, into: torch.Tensor, value: torch.Tensor, via: tuple[Any, ...], *, keeps: bool = False
) -> None:
    """Record a ``copy_`` to a view whose axes interleave or overlap in memory.

    Args:
        record: Record of the run.
        into: Destination.
        value: Source.
        via: Casts and functions that the elements pass through.
        keeps: Whether the new values are computed from the old ones. If so, the old ones don't count as overwritten.

    Raises:
        TraceError: the view is expanded, or one place in memory would get different elements of the value.
    """
    view = into.meta if isinstance(into, Tracer) else into
    if _is_expanded(view):
        record.refuse("writing", [into], why=_EXPANDED)
    with torch._C._DisableTorchDispatch():
        places = places_of(view)
    write_places(record, into, places, value, via, keeps=keeps)


def write_places(
    record: Cells,
    into: torch.Tensor,
    places: torch.Tensor,
    value: torch.Tensor,
    via: tuple[Any, ...],
    *,
    keeps: bool = False,
) -> None:
    """Record a write of a value to any flat indices of a storage.

    Args:
        record: Record of the run.
        into: Any view of the storage.
        places: Flat index in the storage for each element; the value is broadcast to the shape of this tensor.
        value: Source.
        via: Casts and functions that the elements pass through.
        keeps: Whether the new values are computed from the old ones. If so, the old ones don't count as overwritten.

    Raises:
        TraceError: one flat index would get different elements of the value.
    """
    for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
        value = value.narrow(dim, 0, 1) if size > 1 and not stride else value  # repeated elements share one number
    with torch._C._DisableTorchDispatch():
        numbers = torch.arange(value.numel(), device="cpu").reshape(value.shape).expand(places.shape)
        to, at = places.reshape(-1).numpy(), numbers.reshape(-1).numpy()
    order = np.argsort(to, kind="stable")
    to, at = to[order], at[order]
    again = to[1:] == to[:-1]
    if (again & (at[1:] != at[:-1])).any():
        record.refuse("writing", [into, value], why=_TWICE)
    is_new = np.concatenate([np.ones(min(1, len(to)), bool), ~again])
    to, at = to[is_new], at[is_new]
    step = 1 if value.numel() > 1 else 0
    first = np.flatnonzero(np.concatenate([is_new[:1], (np.diff(to) != 1) | (np.diff(at) != step)]))
    counts = np.diff(np.append(first, len(to)))
    columns = zip(at[first].tolist(), counts.tolist(), to[first].tolist(), strict=True)
    reads = rolled(read_of(low, (count,), (1,), (step,), place) for low, count, place in columns)
    flat = Moves(record.reads(value, dense(tuple(value.shape)).stride))
    record.exchange(into, list(map(in_place, reads)), through(flat.find(reads)[0], via), keeps=keeps)

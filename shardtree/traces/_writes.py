"""Writes to tensors: to all of a view, as ``copy_`` does, or to any places of a storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..core.lazy import dense
from ._cells import Cells, Tracer
from ._moves import Move, Moves, in_place, is_nested, read_of, rolled, through
from ._steps import cast

_EXPANDED = "the view has elements more than once, as an expanded one: torch writes to its clone alone"
_TWICE = "several elements go to one place, and which of them stays is torch's choice"


def copy_into(
    record: Cells, into: torch.Tensor, tensor: torch.Tensor, via: tuple[Any, ...] = (), *, keeps: bool = False
) -> None:
    """Record a ``copy_``, which broadcasts and casts.

    Args:
        record: Record of the run.
        into: Destination.
        tensor: Source.
        via: Steps that the elements go through besides.
        keeps: Whether the new values are computed from the old ones, which then aren't lost.
    """
    view = into.meta if isinstance(into, Tracer) else into
    tensor = tensor if tensor.shape == view.shape else tensor.expand(view.shape)
    via = via or cast(tensor.dtype, view.dtype)
    if (hole := _hole_of(view)) is None:
        _write_apart(record, into, tensor, via, keeps=keeps)
    else:
        moves = through(record.reads(tensor, view.stride(), int(view.storage_offset())), via)
        record.exchange(into, [hole], moves, keeps=keeps)


def put(record: Cells, into: torch.Tensor, moves: Sequence[Move]) -> None:
    """Record that moves write all of a view, instead of what was there."""
    if (hole := _hole_of(into.meta if isinstance(into, Tracer) else into)) is None:
        record.refuse("writing", [into], why=_EXPANDED)
    record.exchange(into, [hole], moves)


def places_of(view: torch.Tensor) -> torch.Tensor:
    """Return where in its storage each element of a view is."""
    places = torch.full((1,) * view.ndim, int(view.storage_offset()), device="cpu")
    for dim, (size, step) in enumerate(zip(view.shape, view.stride(), strict=True)):
        steps = torch.arange(size, device="cpu") * step
        places = places + steps.reshape([-1 if axis == dim else 1 for axis in range(view.ndim)])
    return places


def _hole_of(view: torch.Tensor) -> Move | None:
    """Return the places of a view as a read of them to themselves, None if they aren't nested."""
    place, stride = int(view.storage_offset()), view.stride()
    hole = read_of(place, view.shape, stride, stride, place)
    return hole if is_nested(hole) or not view.numel() else None


def _write_apart(
    record: Cells, into: torch.Tensor, value: torch.Tensor, via: tuple[Any, ...], *, keeps: bool = False
) -> None:
    """Record a ``copy_`` to a view whose elements aren't nested, as those of windows.

    Raises:
        TraceError: the view is expanded, or two elements of the value go to one place.
    """
    view = into.meta if isinstance(into, Tracer) else into
    if any(size > 1 and not step for size, step in zip(view.shape, view.stride(), strict=True)):
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
    """Record a write to any places of a storage.

    Args:
        record: Record of the run.
        into: View of the storage.
        places: Place of each element in the storage; the value is broadcast to its shape.
        value: Source.
        via: Steps that the elements go through.
        keeps: Whether the new values are computed from the old ones, which then aren't lost.

    Raises:
        TraceError: Two elements of the value go to one place.
    """
    for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
        value = value.narrow(dim, 0, 1) if size > 1 and not stride else value  # the same element has one number
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

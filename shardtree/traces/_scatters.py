"""Writes by known indices: each element of a value goes to a place of a storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..core.lazy import dense
from ._gathers import Rule, check_numbers, known, only_axis, positions_along, runs
from ._moves import Move, Moves, in_place, is_nested, read_of, rolled, through
from ._steps import cast, number, operator_name
from ._tracer import Tracer

if TYPE_CHECKING:
    from ._cells import Cells

IndexOf = Callable[[torch.Tensor], torch.Tensor]
"""An indexing expression: takes elements of a tensor, or numbers of a tensor like it."""

EXPANDED = "the view has elements more than once, as an expanded one: torch writes to its clone alone"
_TWICE = "several elements go to one place, and which of them stays is torch's choice"
_SUM = "several elements are added to one place, and what that rounds to depends on torch's order"


def places_of(view: torch.Tensor) -> torch.Tensor:
    """Return where in its storage each element of a view is."""
    places = torch.full((1,) * view.ndim, int(view.storage_offset()), device="cpu")
    for dim, (size, step) in enumerate(zip(view.shape, view.stride(), strict=True)):
        steps = torch.arange(size, device="cpu") * step
        places = places + steps.reshape([-1 if axis == dim else 1 for axis in range(view.ndim)])
    return places


def hole_of(view: torch.Tensor) -> Move | None:
    """Return the places of a view as a read of them to themselves, None if they aren't nested."""
    place, stride = int(view.storage_offset()), view.stride()
    hole = read_of(place, view.shape, stride, stride, place)
    return hole if is_nested(hole) or not view.numel() else None


def write_apart(
    record: Cells, into: torch.Tensor, value: torch.Tensor, via: tuple[Any, ...], *, keeps: bool = False
) -> None:
    """Record a ``copy_`` to a view whose elements aren't nested, as those of windows.

    Raises:
        TraceError: the view is expanded, or two elements of the value go to one place.
    """
    view = into.meta if isinstance(into, Tracer) else into
    if any(size > 1 and not step for size, step in zip(view.shape, view.stride(), strict=True)):
        record.refuse("writing", [into], why=EXPANDED)
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
        record: of the run.
        into: a view of the storage.
        places: where each element of the value goes, which is broadcast to it.
        value: what is written.
        via: what its elements go through.
        keeps: whether it is made of what was there.

    Raises:
        TraceError: two elements of the value go to one place.
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


def _scatter(
    record: Cells, func: Any, into: torch.Tensor, index_of: IndexOf, value: Any, *, adds: bool = False
) -> None:
    """Record a write to the places that an indexing expression takes, or an addition to what is there."""
    view = into.meta if isinstance(into, Tracer) else into
    with torch._C._DisableTorchDispatch():
        places = index_of(places_of(view))
    if adds:
        if len(np.unique(places.numpy())) < places.numel():
            record.refuse(operator_name(func), [into], why=_SUM)
        value = index_of(into) + value
    elif not isinstance(value, torch.Tensor):
        value = number(value, into.dtype)
    write_places(record, into, places, value, cast(value.dtype, into.dtype), keeps=adds)


def _index_put_at(
    record: Cells, func: Any, into: torch.Tensor, indices: Any, value: Any, accumulate: bool = False
) -> None:
    _scatter(record, func, into, lambda tensor: torch.ops.aten.index.Tensor(tensor, indices), value, adds=accumulate)


def _masked_fill(record: Cells, func: Any, into: torch.Tensor, mask: torch.Tensor, value: Any) -> None:
    _scatter(record, func, into, lambda tensor: tensor[mask.expand(tensor.shape)], value)


def _masked_scatter(record: Cells, func: Any, into: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> None:
    mask = mask.expand(into.shape)
    _scatter(record, func, into, lambda tensor: tensor[mask], source.reshape(-1)[: int(mask.sum())])


def _put(
    record: Cells, func: Any, into: torch.Tensor, index: torch.Tensor, source: Any, accumulate: bool = False
) -> None:
    _scatter(record, func, into, lambda tensor: tensor.take(index), source.reshape(index.shape), adds=accumulate)


def _index_axis(record: Cells, func: Any, into: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> None:
    _scatter(record, func, into, lambda tensor: tensor.index_select(dim, index), value)


def _index_add(
    record: Cells, func: Any, into: torch.Tensor, dim: int, index: torch.Tensor, source: Any, *, alpha: Any = 1
) -> None:
    if alpha != 1:
        record.refuse(f"{operator_name(func)} with alpha", [into, source])
    _scatter(record, func, into, lambda tensor: tensor.index_select(dim, index), source, adds=True)


def _scatter_along(
    record: Cells,
    func: Any,
    into: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    value: Any,
    *,
    reduce: str | None = None,
    adds: bool = False,
) -> None:
    if reduce is not None:
        record.refuse(f"{operator_name(func)} with reduce", [into])
    if isinstance(value, torch.Tensor) and value.ndim:
        value = value[tuple([slice(size) for size in index.shape])]
    _scatter(record, func, into, lambda tensor: tensor.gather(dim, index), value, adds=adds)


def _rehearsed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what an operation gives on zeros, after torch's own checks of all arguments."""
    first, *rest = args
    with torch._C._DisableTorchDispatch():

        def zeros(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu").zero_()

        others = [zeros(each) if isinstance(each, Tracer) else each for each in rest]
        return func(zeros(first), *others, **kwargs)


def _in_place(write: Callable[..., None]) -> Rule:
    """Return the rule of an operation that writes by indices."""

    def writing(record: Cells, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        check_numbers(record, func, args[0])
        args, kwargs = known(record, func, args, kwargs)
        _rehearsed(func, args, kwargs)
        write(record, func, *args, **kwargs)
        into: torch.Tensor = args[0]
        return into

    return writing


def _copying(write: Callable[..., None]) -> Rule:
    """Return the rule of an operation that copies a tensor and writes to the copy."""

    def copying(record: Cells, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        check_numbers(record, func, args[0])
        args, kwargs = known(record, func, args, kwargs)
        like = _rehearsed(func, args, kwargs)
        new = record.fresh(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta"))
        record.write(new, args[0])
        write(record, func, new, *args[1:], **kwargs)
        return new

    return copying


def _index_put(
    record: Cells,
    func: Any,
    into: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    value: torch.Tensor,
    accumulate: bool = False,
) -> torch.Tensor:
    (_, indices), _ = known(record, func, (into, indices), {})
    dim = None if accumulate or value.dtype is not into.dtype else only_axis(into, indices)
    if dim is not None:
        positions, inner = positions_along(into, indices, dim)
        index: Any = indices[dim]
        # What is written twice, and a mask of bytes, which torch takes at times, are looked at by number.
        if len(np.unique(positions)) == len(positions) and index.dtype is not torch.uint8:
            value = value.expand((*into.shape[:dim], *inner, *into.shape[dim + 1 :]))
            value = value.reshape((*into.shape[:dim], len(positions), *into.shape[dim + 1 :]))
            for place, first, count in runs(positions):
                record.write(into.narrow(dim, first, count), value.narrow(dim, place, count))
            return into
    return _in_place(_index_put_at)(record, func, into, indices, value, accumulate)


_WRITES: dict[str, Callable[..., None]] = {
    "index_put": _index_put_at,
    "index_copy": _index_axis,
    "index_fill": _index_axis,
    "index_add": _index_add,
    "masked_fill": _masked_fill,
    "masked_scatter": _masked_scatter,
    "scatter": _scatter_along,
    "scatter_add": partial(_scatter_along, adds=True),
    "put": _put,
}
RULES: dict[str, Rule] = {
    **{name: _copying(write) for name, write in _WRITES.items()},
    **{f"{name}_": _in_place(write) for name, write in _WRITES.items()},
    "index_put_": _index_put,
}
"""From an operator's name to how it is recorded."""

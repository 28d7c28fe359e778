"""Writes by known indices: each element of a value is written to a flat index of a storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ._arguments import tensors_in
from ._cells import Cells, Tracer
from ._gathers import Rule, check_numbers, known, only_axis, positions_along, runs
from ._steps import cast, number, operator_name
from ._writes import check_apart, copy_into, places_of, write_places

IndexOf = Callable[[torch.Tensor], torch.Tensor]
"""An indexing expression: a function that returns indexed items of a tensor, or of its elements' flat indices."""

_ZEROS = "torch adds complex numbers in two ways, which give zeros of different signs"
_ALPHA = "only additions with alpha=1 are recorded"
_REDUCE = "no other reduction than scatter_add is recorded"
_SUM = "several elements are added to one place, and the rounding of their sum depends on torch's order"


def _scatter(
    record: Cells, func: Any, into: torch.Tensor, index_of: IndexOf, value: Any, *, adds: bool = False
) -> None:
    """Record a write to the elements that an indexing expression selects, or an addition to them."""
    view = into.meta if isinstance(into, Tracer) else into
    with torch._C._DisableTorchDispatch():
        places = index_of(places_of(view))
    if adds:
        if len(np.unique(places.numpy())) < places.numel():
            record.refuse(operator_name(func), [into], why=_SUM)
        if into.dtype.is_complex:
            record.refuse(operator_name(func), [into], why=_ZEROS)
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
        record.refuse(f"{operator_name(func)} with alpha", [into], _ALPHA, "Multiply the source first.")
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
        record.refuse(f"{operator_name(func)} with reduce", [into], why=_REDUCE)
    if isinstance(value, torch.Tensor) and value.ndim:
        value = value[tuple([slice(size) for size in index.shape])]
    _scatter(record, func, into, lambda tensor: tensor.gather(dim, index), value, adds=adds)


def _rehearsed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operation on zeros instead of unknown elements, so that torch checks its arguments; return the result."""
    first, *values = args
    with torch._C._DisableTorchDispatch():

        def zeros(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu").zero_()

        others = [
            zeros(value) if isinstance(value, torch.Tensor) and value.is_meta | isinstance(value, Tracer) else value
            for value in values
        ]
        return func(zeros(first), *others, **kwargs)


def _in_place(write: Callable[..., None]) -> Rule:
    """Return the rule of an in-place operation such as `index_fill_`.

    Args:
        write: Function that records the change, after the rule has checked the arguments.
    """

    def writing(record: Cells, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        check_numbers(record, func, args[0])
        check_apart(record, operator_name(func), args[0], tensors_in(args[1:], kwargs), may_be_same=False)
        args, kwargs = known(record, func, args, kwargs)
        _rehearsed(func, args, kwargs)
        write(record, func, *args, **kwargs)
        into: torch.Tensor = args[0]
        return into

    return writing


def _copying(write: Callable[..., None]) -> Rule:
    """Return the rule of an operation that returns a changed copy, such as `index_fill`.

    Args:
        write: Function that records the same change in place, on the copy.
    """

    def copying(record: Cells, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        check_numbers(record, func, args[0])
        args, kwargs = known(record, func, args, kwargs)
        like = _rehearsed(func, args, kwargs)
        new = record.fresh(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta"))
        copy_into(record, new, args[0])
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
    check_apart(record, operator_name(func), into, [value], may_be_same=False)
    (_, indices), _ = known(record, func, (into, indices), {})
    dim = None if accumulate or value.dtype is not into.dtype else only_axis(into, indices)
    if dim is not None:
        positions, inner = positions_along(into, indices, dim)
        index: Any = indices[dim]
        # Repeated positions, and masks of bytes, which torch sometimes accepts, are recorded place by place.
        if len(np.unique(positions)) == len(positions) and index.dtype is not torch.uint8:
            value = value.expand((*into.shape[:dim], *inner, *into.shape[dim + 1 :]))
            value = value.reshape((*into.shape[:dim], len(positions), *into.shape[dim + 1 :]))
            for place, first, count in runs(positions):
                copy_into(record, into.narrow(dim, first, count), value.narrow(dim, place, count))
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
"""Functions that record operations, by operator's name."""

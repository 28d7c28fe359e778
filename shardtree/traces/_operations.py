"""How torch's operations are recorded: which move elements, which compute each of them, and which need a rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..lazy import dense
from ._moves import Moves, read_of, rolled, through, whole
from ._steps import EXACT, INEXACT, Computed, Constant, Function, Operand, reread
from ._tracer import Tracer, is_ordinary, meta_of, tensors_in

if TYPE_CHECKING:
    from ._recording import Record

ELEMENTWISE = EXACT | INEXACT
VIEWS = {"detach", "alias", "_unsafe_view", "_reshape_alias", "lift_fresh", "view"}
EMPTY = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
RANDOM = {"rand_like", "randn_like", "randint_like"}
_MOST_NUMBERS = 1 << 26
"""Of at most so many elements each gets a number, for a gather along several axes at once."""


def _made_like(record: Record, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tracer:
    """Return the empty result of an operation that makes a new tensor; devices aren't traced."""
    # The dtype and the memory format stay: strides follow from them.
    options = {word: value for word, value in kwargs.items() if word not in ("device", "pin_memory", "non_blocking")}
    options |= {"device": torch.device("meta")} if "device" in kwargs else {}
    return record.fresh(func(*meta_of(args), **options))


def _record_copy(record: Record, func: Any, tensor: torch.Tensor, **kwargs: Any) -> Tracer:
    new = _made_like(record, func, [tensor], kwargs)
    record.write(new, tensor)
    return new


def _fill_rule(value: int | None, place: int = 0) -> Callable[..., torch.Tensor]:
    """Return the rule of an operation that fills a new tensor with a number, or with the argument at a place."""

    def rule(record: Record, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return fill(record, func, _made_like(record, func, args, kwargs), args[place] if value is None else value)

    return rule


def fill(record: Record, func: Any, into: torch.Tensor, value: Any = 0) -> torch.Tensor:
    """Record that all elements of a view are one number, or an element of a tensor."""
    if not isinstance(value, torch.Tensor):
        with torch._C._DisableTorchDispatch():
            value = torch.tensor(value, dtype=into.dtype, device="cpu")
    record.write(into, value)
    return into


def _random(record: Record, func: Any, into: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Record that what was there is gone: random elements are nobody's, so they count as never written."""
    record.put(into, ())
    return into


def _copy(record: Record, func: Any, into: torch.Tensor, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    if not isinstance(into, Tracer) and not is_ordinary(into):
        record.refuse(f"copy_ into a {type(into).__name__}", [tensor])
    record.write(into, tensor)
    return into


def _cat(record: Record, func: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    new = _made_like(record, func, [tensors, dim], {})
    parts = [each for each in tensors if each.shape != (0,)]  # torch joins these with tensors of any shape
    for part, end in zip(parts, accumulate(each.shape[dim] for each in parts), strict=True):
        record.write(new.narrow(dim, end - part.shape[dim], part.shape[dim]), part)
    return new


def _stack(record: Record, func: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    return torch.cat([each.unsqueeze(dim) for each in tensors], dim % (tensors[0].ndim + 1))


# Gathers and scatters by known indices: each run of consecutive indices is a read, and `rolled` joins regular ones.


def _runs(index: np.ndarray[Any, Any]) -> list[tuple[int, int, int]]:
    """Return (place, first index, count) of each run of consecutive indices."""
    edges = np.flatnonzero(np.diff(index, prepend=-9, append=-9) != 1)
    return list(zip(edges[:-1].tolist(), index[edges[:-1]].tolist(), np.diff(edges).tolist(), strict=True))


def _regular(index: np.ndarray[Any, Any]) -> list[tuple[int, int]] | None:
    """Return the loops (count, step), outermost first, that an index is, None if it is none: so it is one move."""
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


def _index_along(record: Record, index: torch.Tensor, length: int) -> np.ndarray[Any, Any]:
    """Return an index as positions along an axis."""
    if isinstance(index, Tracer):
        record.refuse("an index", [index])
    with torch._C._DisableTorchDispatch():
        index_values = index.nonzero().reshape(-1) if index.dtype in (torch.bool, torch.uint8) else index.reshape(-1)
        places: np.ndarray[Any, Any] = index_values.cpu().numpy().astype(np.int64)
    if places.size and not (-length <= places.min() and places.max() < length):
        raise IndexError(f"index {places.min()} to {places.max()} is out of bounds for an axis of {length}")
    return places % max(1, length)  # negative ones count from the end


def _index_select(record: Record, func: Any, tensor: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    dim %= max(1, tensor.ndim)
    return _gather(record, tensor, dim, _index_along(record, index, tensor.shape[dim]))


def _gather(record: Record, tensor: torch.Tensor, dim: int, index: np.ndarray[Any, Any]) -> Tracer:
    view: torch.Tensor = meta_of(tensor)
    shape = (*view.shape[:dim], len(index), *view.shape[dim + 1 :])
    new = record.fresh(torch.empty(shape, dtype=view.dtype, device="meta"))
    own, strides, start = new.meta.stride(), view.stride(), int(view.storage_offset())
    loops = _regular(index) if len(index) else []
    if loops is None:
        reads = [
            read_of(
                start + first * strides[dim], (*shape[:dim], count, *shape[dim + 1 :]), own, strides, place * own[dim]
            )
            for place, first, count in _runs(index)
        ]
    else:
        counts = [count for count, _ in loops]
        sizes = (*shape[:dim], *counts, *shape[dim + 1 :])
        into = (*own[:dim], *(each * own[dim] for each in dense(tuple(counts)).stride), *own[dim + 1 :])
        steps = (*strides[:dim], *(step * strides[dim] for _, step in loops), *strides[dim + 1 :])
        reads = [read_of(start + int(index[0]) * strides[dim], sizes, into, steps)] if len(index) else []
    cell = record.cell(tensor)
    moves = rolled(cell.writes.find(rolled(reads))[0])
    record.put(new, list(through(moves, reread(cell.dtype, tensor.dtype))))
    return new


def _one_index(
    record: Record, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]
) -> tuple[int, np.ndarray[Any, Any], tuple[int, ...]]:
    """Return the axis that is indexed, the positions along it, and the axes that it becomes."""
    [(dim, index)] = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    places = _index_along(record, index, tensor.shape[dim])
    return dim, places, (len(places),) if index.dtype in (torch.bool, torch.uint8) else tuple(index.shape)


def _index(record: Record, func: Any, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    tensors = [index for index in indices if index is not None]
    if len(tensors) > 1 or (tensors[0].dtype is torch.bool and tensors[0].ndim > 1):
        return by_number(record, func, tensor, indices)
    dim, numbers, inner = _one_index(record, tensor, indices)
    return _gather(record, tensor, dim, numbers).reshape((*tensor.shape[:dim], *inner, *tensor.shape[dim + 1 :]))


def _index_put(
    record: Record,
    func: Any,
    into: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    value: torch.Tensor,
    accumulate: bool = False,
) -> torch.Tensor:
    if accumulate or sum(index is not None for index in indices) > 1:
        record.refuse("index_put_ by several tensors, or one that adds,", [into, value])
    dim, numbers, inner = _one_index(record, into, indices)
    value = value.expand((*into.shape[:dim], *inner, *into.shape[dim + 1 :]))
    value = value.reshape((*into.shape[:dim], len(numbers), *into.shape[dim + 1 :]))
    for place, first, count in _runs(numbers):
        record.write(into.narrow(dim, first, count), value.narrow(dim, place, count))
    return into


def _index_copy(
    record: Record, func: Any, into: torch.Tensor, dim: int, index: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    return _index_put(record, func, into, [*(None,) * (dim % into.ndim), index], value)


def _flip(record: Record, func: Any, tensor: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    for dim in dims:
        index = np.arange(tensor.shape[dim] - 1, -1, -1, dtype=np.int64)
        tensor = _gather(record, tensor, dim % tensor.ndim, index)
    return tensor


def by_number(record: Record, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Record an operation that moves elements by known indices, by doing it to the elements' numbers."""
    others = [each for each in tensors_in(args, kwargs) if isinstance(each, Tracer)]
    if others or tensor.numel() > _MOST_NUMBERS:
        record.refuse(func.name().removeprefix("aten::"), others or [tensor])
    with torch._C._DisableTorchDispatch():
        # From 1: what an operation fills with zeros has no number.
        numbers = torch.arange(1, tensor.numel() + 1, device="cpu").reshape(tensor.shape)
        result = func(numbers, *args, **kwargs)
        index = result.reshape(-1).numpy() - 1
    new = record.fresh(torch.empty(result.shape, dtype=tensor.dtype, device="meta"))
    flat = Moves(record.reads(tensor, dense(tuple(tensor.shape)).stride))
    reads = [read_of(first, (count,), (1,), (1,), place) for place, first, count in _runs(index) if first >= 0]
    if (index < 0).any():
        fill(record, func, new)
    for move in flat.find(rolled(reads))[0]:
        # Instead of the zeros, if there are any.
        new.cell.writes.take(move)
        new.cell.writes.add(move)
    return new


def _pad(record: Record, func: Any, tensor: torch.Tensor, pad: Sequence[int], value: float = 0) -> torch.Tensor:
    pairs = list(zip(pad[::2], pad[1::2], strict=True))[::-1]
    pairs = [(0, 0)] * (tensor.ndim - len(pairs)) + pairs  # torch names the last axis first, and may stop early
    sizes = [size + low + high for size, (low, high) in zip(tensor.shape, pairs, strict=True)]
    new = tensor.new_full(sizes, value)
    to, inner = new, tensor
    for dim, (low, high) in enumerate(pairs):
        inner = inner.narrow(dim, max(0, -low), inner.shape[dim] + min(0, low) + min(0, high))
        to = to.narrow(dim, max(0, low), inner.shape[dim])
    to.copy_(inner)
    return new


def _repeat(record: Record, func: Any, tensor: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    sizes = (*(1,) * (len(counts) - tensor.ndim), *tensor.shape)
    wide = [each for pair in zip(counts, sizes, strict=True) for each in pair]
    ones = [each for size in sizes for each in (1, size)]
    whole_shape = [count * size for count, size in zip(counts, sizes, strict=True)]
    return tensor.reshape(ones).expand(wide).reshape(whole_shape).clone()


def _roll(
    record: Record, func: Any, tensor: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()
) -> torch.Tensor:
    new = tensor if dims else tensor.reshape(-1)
    for shift, dim in zip(shifts, dims or [0], strict=True):
        length = new.shape[dim]
        new = _gather(record, new, dim % new.ndim, (np.arange(length) - shift) % max(1, length))
    return new.reshape(tensor.shape)


# Functions of each element.


def elementwise(record: Record, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tracer:
    """Record a function of each element: of one tensor as what its elements go through, else as something computed."""
    meta = func(*meta_of(args), **kwargs)
    new = record.fresh(meta)
    # A tensor without axes is a number to torch, too: it doesn't decide the dtype.
    values: list[Any] = [
        Constant(each.detach().clone())
        if isinstance(each, torch.Tensor) and not isinstance(each, Tracer) and not each.ndim
        else each
        for each in args
    ]
    options = tuple(sorted(kwargs.items()))
    places = [number for number, value in enumerate(values) if isinstance(value, torch.Tensor)]
    if len(places) == 1 and values[places[0]].shape == meta.shape:
        # What the tensor's elements go through: its moves stay moves of sources.
        tensor, values[places[0]] = values[places[0]], None
        record.write(new, tensor, (Function(func, places[0], tuple(values), options, alone=not tensor.ndim),))
        return new
    steps = dense(tuple(meta.shape)).stride
    for place in places:
        tensor = values[place]
        reads = record.reads(tensor.expand(meta.shape), steps) if tensor.ndim else record.reads(tensor, ())
        values[place] = Operand(Moves(reads), tensor.dtype, alone=not tensor.ndim)
    root = Computed(func, tuple(values), options, meta.dtype)
    flat = Moves(whole(root, meta.numel()))
    record.put(new, flat.find([read_of(0, meta.shape, meta.stride(), steps)])[0])
    return new


RULES: dict[str, Callable[..., torch.Tensor]] = {
    "clone": _record_copy,
    "_to_copy": _record_copy,
    "cat": _cat,
    "stack": _stack,
    "copy_": _copy,
    "fill_": fill,
    "zero_": fill,
    "index_select": _index_select,
    "index": _index,
    "index_put_": _index_put,
    "index_copy_": _index_copy,
    "flip": _flip,
    "roll": _roll,
    "repeat": _repeat,
    "constant_pad_nd": _pad,
    "zeros_like": _fill_rule(0),
    "ones_like": _fill_rule(1),
    "new_zeros": _fill_rule(0),
    "new_ones": _fill_rule(1),
    "full_like": _fill_rule(None, 1),
    "new_full": _fill_rule(None, 2),
    **dict.fromkeys(("gather", "take", "rot90", "repeat_interleave", "tril", "triu", "take_along_dim"), by_number),
    **dict.fromkeys(("masked_select", "channel_shuffle", "pixel_shuffle", "pixel_unshuffle", "im2col"), by_number),
    **dict.fromkeys(EMPTY | RANDOM, lambda record, func, *args, **kwargs: _made_like(record, func, args, kwargs)),
    **dict.fromkeys(("uniform_", "normal_", "random_", "bernoulli_", "exponential_"), _random),
}
"""From an operator's name to how it is recorded, called with the record, the operator and its arguments."""

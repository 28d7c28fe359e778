"""Rules for recording torch's operations: moves of elements, functions of each element, and special cases.

The record of a storage is a cell (`MemoryCell`). Its moves (`Move`) say where the storage's elements come from. A
tensor is a view of a cell, and an operation that writes to the tensor replaces moves of the cell. Here,
``p.data[2:4].copy_(w)`` writes a source ``w`` (2, 3) to a parameter ``p`` (6, 3), both shown by flat indices::

    w: a view of its cell            p.data[2:4]: a view of p's cell
    offset 0, strides (3, 1)         offset 6, strides (3, 1)
    [0][1][2]                          0   1   2
    [3][4][5]                          3   4   5
                                      [6] [7] [8]
                                      [9] [10][11]
                                       12  13  14
                                       15  16  17

    first:  remove from p's cell the old moves to the indices 6 to 11
    second: add Move("w", to=6, at=0, loops=((6, 1, 1),)), which copies w into the view of p

An operation that returns a view makes another meta tensor, and changes no cell. A function of one tensor's elements is
added to the steps that they pass through (`Move.via`). A function of several tensors becomes the root of a new move
(`Computed`). Moves are immutable, so a cell gets new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from ..core.codec import dtype_name
from ..core.lazy import EXACT, INEXACT, dense, is_exact
from . import _gathers as gathers
from . import _scatters as scatters
from ._arguments import is_ordinary, tensors_in
from ._cells import PLAIN_ONLY, Cells, Tracer, meta_of
from ._constants import EMPTY, FILLED
from ._moves import Moves, read_of, whole
from ._steps import Computed, Constant, Function, Operand, number, operator_name
from ._writes import check_apart, copy_into, put

ELEMENTWISE = EXACT | INEXACT
VIEWS = {"detach", "alias", "_unsafe_view", "_reshape_alias", "lift_fresh", "view"}
RANDOM = {"rand_like", "randn_like", "randint_like"}


def _made_like(record: Cells, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tracer:
    """Return a tensor with the shape and dtype of an operation's result, and with no element written yet.

    The device that the operation asks for is ignored.
    """
    # The dtype and the memory format stay: strides follow from them.
    options = {word: value for word, value in kwargs.items() if word not in ("device", "pin_memory", "non_blocking")}
    options |= {"device": torch.device("meta")} if "device" in kwargs else {}
    return record.fresh(func(*meta_of(args), **options))


def _record_copy(record: Cells, func: Any, tensor: torch.Tensor, **kwargs: Any) -> Tracer:
    new = _made_like(record, func, [tensor], kwargs)
    copy_into(record, new, tensor)
    return new


def _fill_rule(value: int | None, place: int = 0) -> Callable[..., torch.Tensor]:
    """Return a rule, a function that records an operation, for operations that fill a new tensor, such as `full`.

    Args:
        value: Number that fills the tensor; None if the operation has an argument for it.
        place: Position of this argument.
    """

    def rule(record: Cells, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return fill(record, func, _made_like(record, func, args, kwargs), args[place] if value is None else value)

    return rule


def fill(record: Cells, func: Any, into: torch.Tensor, value: Any = 0) -> torch.Tensor:
    """Record that all elements of a view get one value: a number, or the element of a tensor without axes."""
    if isinstance(value, torch.Tensor):
        if value.ndim:
            record.refuse(operator_name(func), [value], why=f"it takes a number, not a tensor of {value.ndim} axes")
        copy_into(record, into, value)
        return into
    view = into
    for dim, (size, step) in enumerate(zip(into.shape, into.stride(), strict=True)):
        view = view.narrow(dim, 0, 1) if size > 1 and not step else view  # torch fills expanded views, too
    copy_into(record, view, number(value, into.dtype))
    return into


def _random(record: Cells, func: Any, into: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Record that an operation replaces a view's elements by random ones, which count as never written."""
    put(record, into, ())
    return into


def _copy(record: Cells, func: Any, into: torch.Tensor, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    if not isinstance(into, Tracer) and not is_ordinary(into):
        record.refuse(f"copy_ into a {type(into).__name__}", [tensor], why=PLAIN_ONLY)
    check_apart(record, "copy_", into, [tensor])
    copy_into(record, into, tensor)
    return into


def _cat(record: Cells, func: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    new = _made_like(record, func, [tensors, dim], {})
    parts = [each for each in tensors if each.shape != (0,)]  # torch joins these with tensors of any shape
    for part, end in zip(parts, accumulate(each.shape[dim] for each in parts), strict=True):
        copy_into(record, new.narrow(dim, end - part.shape[dim], part.shape[dim]), part)
    return new


def _stack(record: Cells, func: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    return torch.cat([each.unsqueeze(dim) for each in tensors], dim % (tensors[0].ndim + 1))


def _flip(record: Cells, func: Any, tensor: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    new = record.fresh(func(meta_of(tensor), dims))  # torch checks the arguments, and chooses the strides
    for dim in dims if tensor.ndim else ():  # torch accepts an axis for a scalar, which has none
        index = np.arange(tensor.shape[dim] - 1, -1, -1, dtype=np.int64)
        tensor = gathers.gather(record, tensor, dim % tensor.ndim, index)
    copy_into(record, new, tensor)
    return new


def _pad(record: Cells, func: Any, tensor: torch.Tensor, pad: Sequence[int], value: float = 0) -> torch.Tensor:
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


def _repeat(record: Cells, func: Any, tensor: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    sizes = (*(1,) * (len(counts) - tensor.ndim), *tensor.shape)
    wide = [size for pair in zip(counts, sizes, strict=True) for size in pair]
    ones = [length for size in sizes for length in (1, size)]
    whole_shape = [count * size for count, size in zip(counts, sizes, strict=True)]
    return tensor.reshape(ones).expand(wide).reshape(whole_shape).clone()


def _roll(
    record: Cells, func: Any, tensor: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()
) -> torch.Tensor:
    new = tensor if dims and tensor.ndim else tensor.reshape(-1)
    for shift, dim in zip(shifts, dims or [0], strict=True):
        length = new.shape[dim]
        new = gathers.gather(record, new, dim % new.ndim, (np.arange(length) - shift) % max(1, length))
    return new.reshape(tensor.shape)


# Functions of each element.


def elementwise(record: Cells, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tracer:
    """Record an elementwise function, and return its result.

    A function of one tensor is added to the steps that the elements pass through (`Move.via`). The result of a function
    of several tensors becomes a root of moves (`Computed`).
    """
    meta = func(*meta_of(args), **kwargs)
    new = record.fresh(meta)
    # To torch, a tensor without axes is a number, too, which doesn't decide the dtype.
    values: list[Any] = [
        Constant(value.detach().clone())
        if isinstance(value, torch.Tensor) and not isinstance(value, Tracer) and not value.ndim and not value.is_meta
        else value
        for value in args
    ]
    options = tuple(sorted(kwargs.items()))
    places = [number for number, value in enumerate(values) if isinstance(value, torch.Tensor)]
    if len(places) == 1 and values[places[0]].shape == meta.shape:
        # The function becomes a step of the tensor's moves, whose roots stay sources.
        tensor, values[places[0]] = values[places[0]], None
        # Without axes, the other arguments decide the dtype, and the vector's length may decide the last bit.
        is_steady = is_exact(operator_name(func), args, kwargs)
        is_alone = not tensor.ndim and (not is_steady or any(isinstance(value, Constant) for value in values))
        copy_into(record, new, tensor, (Function(func, places[0], tuple(values), options, is_alone),))
        return new
    steps = dense(tuple(meta.shape)).stride
    for place in places:
        tensor = values[place]
        reads = record.reads(tensor.expand(meta.shape), steps) if tensor.ndim else record.reads(tensor, ())
        values[place] = Operand(Moves(reads), tensor.dtype, alone=not tensor.ndim)
    root = Computed(func, tuple(values), options, meta.dtype)
    flat = Moves(whole(root, meta.numel()))
    put(record, new, flat.find([read_of(0, meta.shape, meta.stride(), steps)])[0])
    return new


def of_one(record: Cells, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tracer | None:
    """Record the maximum or minimum of a tensor of one element as this element; return None for any other operation."""
    if operator_name(func) not in INSTEAD or func._overloadname == "dim" or args[0].numel() != 1:
        return None
    new = _made_like(record, func, args, kwargs)
    copy_into(record, new, args[0].reshape(new.shape))
    return new


# Destinations of operations.


def check_cast(record: Cells, name: str, result: torch.Tensor, into: torch.Tensor) -> None:
    """Raise unless torch casts an operation's result to the destination's dtype; it doesn't cast floats to integers.

    Raises:
        TraceError: torch doesn't cast it.
    """
    if not torch.can_cast(result.dtype, into.dtype):
        why = f"the result is {dtype_name(result.dtype)}, which torch does not cast to {dtype_name(into.dtype)}"
        record.refuse(name, [result], why=why)


def write_out(
    record: Cells, func: Any, out: torch.Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor:
    """Run an operation without ``out=``, record that its result is copied to `out`, and return `out`.

    An ordinary tensor without elements is first resized to the result's shape, as by torch.
    """
    options = {word: value for word, value in kwargs.items() if word != "out"}
    is_elementwise = operator_name(func) in ELEMENTWISE
    check_apart(record, "out=", out, tensors_in(args, options), may_be_same=is_elementwise)
    result: torch.Tensor = func.overloadpacket(*args, **options)
    check_cast(record, "out=", result, out)
    if is_elementwise and result.dtype is not out.dtype:
        _rehearse(func, out, args, options)
    if out.shape != result.shape:
        if isinstance(out, Tracer) or out.numel():
            shapes = f"{[*out.shape]}, and the result's {[*result.shape]}"
            record.refuse("out=", [result], why=f"its shape is {shapes}")
        cell = record.find_cell(out)
        out.resize_(result.shape)
        if cell is not None:
            cell.numel = out.untyped_storage().nbytes() // out.itemsize
    copy_into(record, out, result)
    return out


def _rehearse(func: Any, out: torch.Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Call a function on small tensors, so that torch raises an error if it can't cast the result to `out`'s dtype."""

    def zero(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.zeros((1,) * value.ndim, dtype=value.dtype, device="cpu")

    with torch._C._DisableTorchDispatch():
        func(*map(zero, args), **kwargs, out=zero(out))


_REDUCED = "Write functools.reduce(torch.{}, tensor.unbind(dim)) instead; without dim, tensor.reshape(-1).unbind()."
INSTEAD = {
    **dict.fromkeys(("max", "amax"), _REDUCED.format("maximum")),
    **dict.fromkeys(("min", "amin"), _REDUCED.format("minimum")),
}
"""Advice for operations that reduce the elements of one tensor."""
RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("clone", "_to_copy"), _record_copy),
    "is_pinned": lambda *_: False,
    "_pin_memory": lambda record, func, tensor, *_: tensor.clone(),
    "cat": _cat,
    "stack": _stack,
    "copy_": _copy,
    "fill_": fill,
    "zero_": fill,
    "flip": _flip,
    "roll": _roll,
    "repeat": _repeat,
    "constant_pad_nd": _pad,
    **{name: _fill_rule(*filling) for name, filling in FILLED.items()},
    **gathers.RULES,
    **scatters.RULES,
    **dict.fromkeys(EMPTY | RANDOM, lambda record, func, *args, **kwargs: _made_like(record, func, args, kwargs)),
    **dict.fromkeys(("uniform_", "normal_", "random_", "bernoulli_", "exponential_"), _random),
}
"""Functions that record operations, by operator's name: called with the record, the operator and its arguments."""

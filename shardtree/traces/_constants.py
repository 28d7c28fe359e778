"""Constants on the meta device, which has no memory: the record keeps their elements, and the CPU computes on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..core.lazy import EXACT, dense
from ._arguments import is_ordinary, mapped, tensors_in, written
from ._cells import MOST_KNOWN, Cells, Tracer, constant_move
from ._moves import Moves, read_of
from ._steps import number, operator_name
from ._writes import check_apart, copy_into, put

EMPTY = {"empty", "empty_strided", "empty_like", "empty_permuted", "new_empty", "new_empty_strided"}
FILLED = {
    "zeros": (0, 0),
    "zeros_like": (0, 0),
    "new_zeros": (0, 0),
    "ones": (1, 0),
    "ones_like": (1, 0),
    "new_ones": (1, 0),
    "scalar_tensor": (None, 0),
    "full": (None, 1),
    "full_like": (None, 1),
    "new_full": (None, 2),
}
"""Operations that fill a new tensor, as (number, 0), or as (None, position of the argument with the number)."""
_OF_ELEMENTS = EXACT | {"clone", "_to_copy"}


def note_constants(record: Cells, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    """Record the elements of the meta tensors that an operation, such as ``torch.arange``, returns.

    Nothing is recorded if the elements are unwritten, random, too many, or computed from unknown ones.
    """
    name = operator_name(func)
    tensors = tensors_in([result])
    if name in EMPTY or torch.Tag.nondeterministic_seeded in func.tags or not any(new.is_meta for new in tensors):
        return
    if any(not is_ordinary(new) or record.find_cell(new) is not None for new in tensors):
        return
    if name in FILLED:
        value, place = FILLED[name]
        copy_into(record, result, number(args[place] if value is None else value, result.dtype))
    elif not tensors_in(args, kwargs) and sum(new.numel() for new in tensors) > MOST_KNOWN:
        return
    elif (values := _computed(record, func, args, kwargs)) is not None:
        for tensor, elements in zip(tensors, tensors_in([values]), strict=True):
            write_constant(record, tensor, elements.expand(tensor.shape))


def write_constant(record: Cells, into: torch.Tensor, value: torch.Tensor) -> None:
    """Record that elements of an ordinary tensor (no `Tracer`) are written to another tensor, as constants.

    Args:
        record: Record of the run.
        into: Tensor that is written to.
        value: Ordinary tensor of the same shape; with strides of 0 it repeats one number.
    """
    view = into.meta if isinstance(into, Tracer) else into
    if not view.numel():
        return
    with torch._C._DisableTorchDispatch():
        is_one = not any(value.stride())
        move = constant_move(value.flatten()[:1] if is_one else value.contiguous().reshape(-1))
    steps = (0,) * view.ndim if is_one else dense(tuple(view.shape)).stride
    read = read_of(0, view.shape, view.stride(), steps, int(view.storage_offset()))
    put(record, into, Moves([move]).find([read])[0])


def computed(record: Cells, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return an operation's result, computed on the CPU; None if its arguments' elements are unknown or too many.

    If all tensor arguments are on meta, the result is a meta tensor, and its elements are recorded. It stays on the CPU
    if the operation has an argument `device`.
    """
    value = _computed(record, func, args, kwargs)
    is_away = not any(isinstance(tensor, Tracer) or not tensor.is_meta for tensor in tensors_in(args, kwargs))
    if value is None or not is_away or "device" in kwargs:
        return mapped(partial(_given, record), value)

    def moved(part: Any) -> Any:
        if not isinstance(part, torch.Tensor):
            return part
        with torch._C._DisableTorchDispatch():
            new = torch.empty(part.shape, dtype=part.dtype, device="meta")
        write_constant(record, new, part)
        return new

    return mapped(moved, value)


def _given(record: Cells, value: Any) -> Any:
    """Return a value that was computed on the CPU; if it is a tensor, record that the traced code may change it.

    A tensor that repeats one number is copied first, so that the code may write to each element.
    """
    if isinstance(value, torch.Tensor):
        with torch._C._DisableTorchDispatch():
            value = value.contiguous() if value.numel() > 1 and not any(value.stride()) else value
        record.own(value)
    return value


def change_constants(record: Cells, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Record an in-place operation on constants.

    If some operand's elements are unknown, or the operation is random, the changed tensors' elements become unknown.

    Returns:
        The tensors that the operation changes.
    """
    targets = written(func, args, kwargs)
    for tensor in targets:
        others = [other for other in tensors_in(args, kwargs) if other is not tensor]
        check_apart(record, operator_name(func), tensor, others, may_be_same=False)
    values = _known(record, args, kwargs)
    if values is None or torch.Tag.nondeterministic_seeded in func.tags:
        for tensor in targets:
            put(record, tensor, ())
        return targets
    with torch._C._DisableTorchDispatch():
        own_args = [mapped(_cloned, argument) for argument in values[0]]
        own_kwargs = {word: mapped(_cloned, argument) for word, argument in values[1].items()}
        func(*own_args, **own_kwargs)
    for tensor, value in zip(targets, written(func, own_args, own_kwargs), strict=True):
        write_constant(record, tensor, value)
    return targets


def _cloned(value: Any) -> Any:
    return value.contiguous().clone() if isinstance(value, torch.Tensor) else value


def _known(record: Cells, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]] | None:
    """Return arguments with tensors replaced by their elements on the CPU; None if some elements are unknown.

    An argument `device` that is meta becomes the CPU.
    """
    is_known = True

    def known(value: Any) -> Any:
        nonlocal is_known
        if not isinstance(value, torch.Tensor):
            return value
        elements = record.known_value(value) if is_ordinary(value) or isinstance(value, Tracer) else None
        is_known = is_known and elements is not None
        return elements

    values = [mapped(known, value) for value in args], {word: mapped(known, value) for word, value in kwargs.items()}
    if values[1].get("device") == torch.device("meta"):
        values[1]["device"] = torch.device("cpu")
    return values if is_known else None


def _computed(record: Cells, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if (values := _known(record, args, kwargs)) is None:
        return None
    operands, options = values
    tensors = tensors_in(operands, options)
    is_one = bool(tensors) and not any(any(tensor.stride()) or not tensor.numel() for tensor in tensors)
    is_one = is_one and operator_name(func) in _OF_ELEMENTS
    if not is_one and sum(tensor.numel() for tensor in tensors) > MOST_KNOWN:
        return None
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        if not is_one:
            return func(*operands, **options)
        # Each tensor repeats one number, so one element of the result stands for all.
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))  # type: ignore[no-untyped-call]
        return func(*map(_one_element, operands), **options).expand(shape)


def _one_element(value: Any) -> Any:
    return value.flatten()[:1].reshape((1,) * value.ndim) if isinstance(value, torch.Tensor) else value

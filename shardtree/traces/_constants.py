"""Constants on the meta device: no memory there holds them, so operations on them are computed on the CPU."""

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
"""Operations that fill a new tensor: with which number, or with the argument at which place."""
_OF_ELEMENTS = EXACT | {"clone", "_to_copy"}


def note_constants(record: Cells, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    """Note what tensors on meta hold that an operation made, unless that is random, or made of what isn't known."""
    name = operator_name(func)
    tensors = tensors_in([result])
    if name in EMPTY or torch.Tag.nondeterministic_seeded in func.tags or not any(each.is_meta for each in tensors):
        return
    if any(not is_ordinary(each) or record.find_cell(each) is not None for each in tensors):
        return
    if name in FILLED:
        value, place = FILLED[name]
        copy_into(record, result, number(args[place] if value is None else value, result.dtype))
    elif not tensors_in(args, kwargs) and sum(each.numel() for each in tensors) > MOST_KNOWN:
        return
    elif (values := _computed(record, func, args, kwargs)) is not None:
        for tensor, own in zip(tensors, tensors_in([values]), strict=True):
            write_constant(record, tensor, own.expand(tensor.shape))


def write_constant(record: Cells, into: torch.Tensor, value: torch.Tensor) -> None:
    """Record that a view holds a tensor's elements, which the code has by itself."""
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
    """Return the result of an operation on constants, on their device; None if not all elements are known."""
    value = _computed(record, func, args, kwargs)
    is_away = not any(isinstance(each, Tracer) or not each.is_meta for each in tensors_in(args, kwargs))
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
    """Return a computed tensor as the code gets it: its own, in memory of its own."""
    if isinstance(value, torch.Tensor):
        with torch._C._DisableTorchDispatch():
            value = value.contiguous() if value.numel() > 1 and not any(value.stride()) else value
        record.own(value)
    return value


def change_constants(record: Cells, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Record what an operation in place makes of constants; of other tensors, that they are never written.

    Returns:
        The tensors that it changes.
    """
    targets = written(func, args, kwargs)
    for tensor in targets:
        others = [each for each in tensors_in(args, kwargs) if each is not tensor]
        check_apart(record, operator_name(func), tensor, others, may_be_same=False)
    values = _known(record, args, kwargs)
    if values is None or torch.Tag.nondeterministic_seeded in func.tags:
        for tensor in targets:
            put(record, tensor, ())
        return targets
    with torch._C._DisableTorchDispatch():
        own_args = [mapped(_cloned, each) for each in values[0]]
        own_kwargs = {word: mapped(_cloned, each) for word, each in values[1].items()}
        func(*own_args, **own_kwargs)
    for tensor, value in zip(targets, written(func, own_args, own_kwargs), strict=True):
        write_constant(record, tensor, value)
    return targets


def _cloned(value: Any) -> Any:
    return value.contiguous().clone() if isinstance(value, torch.Tensor) else value


def _known(record: Cells, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]] | None:
    """Return arguments with tensors' elements on the CPU, and what is made there; None if some aren't known."""
    is_known = True

    def known(value: Any) -> Any:
        nonlocal is_known
        if not isinstance(value, torch.Tensor):
            return value
        own = record.known_value(value) if is_ordinary(value) or isinstance(value, Tracer) else None
        is_known = is_known and own is not None
        return own

    values = [mapped(known, each) for each in args], {word: mapped(known, each) for word, each in kwargs.items()}
    if values[1].get("device") == torch.device("meta"):
        values[1]["device"] = torch.device("cpu")
    return values if is_known else None


def _computed(record: Cells, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if (values := _known(record, args, kwargs)) is None:
        return None
    own, options = values
    tensors = tensors_in(own, options)
    is_one = bool(tensors) and not any(any(each.stride()) or not each.numel() for each in tensors)
    is_one = is_one and operator_name(func) in _OF_ELEMENTS
    if not is_one and sum(each.numel() for each in tensors) > MOST_KNOWN:
        return None
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        if not is_one:
            return func(*own, **options)
        # One number each, of any shape: one element of the result is all of it.
        shape = torch.broadcast_shapes(*(each.shape for each in tensors))  # type: ignore[no-untyped-call]
        return func(*map(_one_element, own), **options).expand(shape)


def _one_element(value: Any) -> Any:
    return value.flatten()[:1].reshape((1,) * value.ndim) if isinstance(value, torch.Tensor) else value

"""Equality of functions by value: functions are equal if they run the same code with equal values around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch


def same_value(left: Any, right: Any) -> bool:
    """Return whether two values are equal, where functions that were made alike are equal too.

    Functions are compared by code, module, defaults and captured variables; partial calls by function and arguments;
    methods by function and object; dataclass instances that can be called, or have no equality of their own, by all
    their attributes, save fields that their own equality leaves out. Floats, numpy scalars and numpy arrays are equal
    if their bits are; sets if `==` says so. Tensors and modules are equal only if they are one object, since elements
    aren't read.

    Args:
        left: Any value.
        right: Any value.

    Examples:
        >>> def times(factor):
        ...     return lambda tensor: factor * tensor
        >>> same_value(times(2), times(2)), same_value(times(2), times(3)), times(2) == times(2)
        (True, False, False)
    """
    # Pairs met before are equal if all else is: a function may capture itself, or be captured often. They are kept,
    # since another value could get the id of one that is gone.
    met: dict[tuple[int, int], tuple[Any, Any]] = {}
    pending = [(left, right)]
    while pending:
        one, other = pair = pending.pop()
        if one is other or (id(one), id(other)) in met:
            continue
        if type(one) is not type(other):
            return False
        parts, others = _parts(one), _parts(other)
        if parts is None or others is None:
            if not _same_plain(one, other):
                return False
        elif parts[0] != others[0] or len(parts[1]) != len(others[1]):
            return False
        else:
            met[id(one), id(other)] = pair
            pending += [each for each in zip(parts[1], others[1], strict=True) if each[0] is not each[1]]
    return True


def _same_plain(left: Any, right: Any) -> bool:
    """Return whether two values of one type, that aren't compared by parts, are equal."""
    if isinstance(left, (torch.Tensor, torch.nn.Module)):
        return False
    if isinstance(left, (np.ndarray, np.generic)):
        alike = (left.dtype, left.shape) == (right.dtype, right.shape) and not left.dtype.hasobject
        return alike and left.tobytes() == right.tobytes()
    if isinstance(left, (float, complex)):
        return repr(left) == repr(right)  # NaN is NaN, and 0.0 isn't -0.0
    try:
        return bool(left == right)
    except Exception:  # what can't be compared isn't equal
        return False


def _parts(value: Any) -> tuple[Any, Sequence[Any]] | None:
    """Return the parts of a container or function that must be equal, and its values; None for any other value."""
    further = getattr(value, "__dict__", None) or None  # what was set on a function, or on a subclass's instance
    if isinstance(value, FunctionType):
        captured = [_captured(cell) for cell in value.__closure__ or ()]
        own = (value.__code__, id(value.__globals__))
        return own, [value.__defaults__, value.__kwdefaults__, further, *captured]
    if isinstance(value, partial):
        return (), [value.func, value.args, value.keywords, further]
    if isinstance(value, MethodType):
        return (), [value.__func__, value.__self__]
    if isinstance(value, dict):
        factory = getattr(value, "default_factory", None)
        return list(value), [*value.values(), factory, further]  # in order: the first pattern that fits counts
    if isinstance(value, (list, tuple)):
        return (), [*value, further]
    return _attributes(value) if is_dataclass(value) and not isinstance(value, type) else None


def _attributes(value: Any) -> tuple[Any, Sequence[Any]] | None:
    """Return the names and values of a dataclass instance's attributes; None if it is compared as a whole."""
    kind: Any = type(value)
    has_own = kind.__eq__ is not object.__eq__
    if isinstance(value, torch.nn.Module) or (has_own and not callable(value)):
        return None
    # Not by fields alone: `__post_init__` and subclasses set further attributes, some of them in slots.
    state: Any = object.__getstate__(value)
    named, slots = state if isinstance(state, tuple) else (state, None)
    left_out = {field.name for field in fields(value) if has_own and not field.compare}
    kept = {name: part for name, part in {**(named or {}), **(slots or {})}.items() if name not in left_out}
    return sorted(kept), [kept[name] for name in sorted(kept)]


def _captured(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable without a value yet
        return CellType

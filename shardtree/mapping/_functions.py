"""Equality of functions by value: functions are equal if they run the same code with equal values around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

_Pairs = frozenset[tuple[int, int]]


def same_value(left: Any, right: Any) -> bool:
    """Return whether two values are equal, where functions that were made alike are equal too.

    Functions are compared by code, module, defaults and captured variables; partial calls by function and arguments;
    methods by function and object; dataclass instances that can be called, or have no equality of their own, by their
    fields. Floats and numpy arrays are equal if their bits are. Tensors are equal only if they are one object, since
    their elements aren't read.

    Args:
        left: Any value.
        right: Any value.

    Examples:
        >>> def times(factor):
        ...     return lambda tensor: factor * tensor
        >>> same_value(times(2), times(2)), same_value(times(2), times(3)), times(2) == times(2)
        (True, False, False)
    """
    return _same(left, right, frozenset())


def _same(left: Any, right: Any, pending: _Pairs) -> bool:
    if left is right:
        return True
    if type(left) is not type(right) or isinstance(left, torch.Tensor):
        return False
    if isinstance(left, (float, complex)):
        return repr(left) == repr(right)  # NaN is NaN, and 0.0 isn't -0.0
    if isinstance(left, np.ndarray):
        alike = (left.dtype, left.shape) == (right.dtype, right.shape) and not left.dtype.hasobject
        return alike and left.tobytes() == right.tobytes()
    parts, others = _parts(left), _parts(right)
    if parts is None or others is None:
        try:
            return bool(left == right)
        except Exception:  # what can't be compared isn't equal
            return False
    # A function may capture itself: such a pair is equal if all else is.
    if (id(left), id(right)) in pending:
        return True
    pending |= {(id(left), id(right))}
    sizes = parts[0] == others[0] and len(parts[1]) == len(others[1])
    return sizes and all(_same(one, other, pending) for one, other in zip(parts[1], others[1], strict=True))


def _parts(value: Any) -> tuple[Any, Sequence[Any]] | None:
    """Return what must be equal of a container or function, and the values in it; None for any other value."""
    if isinstance(value, FunctionType):
        captured = [_captured(cell) for cell in value.__closure__ or ()]
        own = [value.__defaults__, value.__kwdefaults__, value.__dict__]
        return (value.__code__, id(value.__globals__)), [*own, *captured]
    if isinstance(value, partial):
        return (), [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return (), [value.__func__, value.__self__]
    if isinstance(value, dict):
        return list(value), list(value.values())  # in order: the first pattern that fits counts
    if isinstance(value, (list, tuple)):
        return (), value
    if not is_dataclass(value) or isinstance(value, type):
        return None
    by_fields = callable(value) or type(value).__eq__ is object.__eq__
    return ((), [getattr(value, field.name) for field in fields(value) if field.compare]) if by_fields else None


def _captured(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable without a value yet
        return CellType

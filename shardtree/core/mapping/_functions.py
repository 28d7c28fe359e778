"""Equality of functions by value: two functions are equal if they run the same code with equal captured values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch


def same_value(left: Any, right: Any) -> bool:
    """Return whether two values are equal; functions are compared by code and captured values, not by identity.

    Functions are compared by code, module, defaults and captured variables; partial calls by function and arguments;
    methods by function and object. Dataclass instances that are callable, or don't define equality, are compared by all
    attributes except fields that their own equality excludes. Floats, numpy scalars and numpy arrays are equal if their
    bits are; sets if `==` is true. Tensors and modules are equal only if they are the same object, since elements
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
    # A pair that was compared before counts as equal: a function may capture itself, or be captured often. The pairs
    # are kept alive, since a new value could get the id of a deleted value.
    met: dict[tuple[int, int], tuple[Any, Any]] = {}
    pending = [(left, right)]
    while pending:
        value, other = pair = pending.pop()
        if value is other or (id(value), id(other)) in met:
            continue
        if type(value) is not type(other):
            return False
        parts, others = _parts(value), _parts(other)
        if parts is None or others is None:
            if not _same_plain(value, other):
                return False
        elif parts[0] != others[0] or len(parts[1]) != len(others[1]):
            return False
        else:
            met[id(value), id(other)] = pair
            pending += [pairs for pairs in zip(parts[1], others[1], strict=True) if pairs[0] is not pairs[1]]
    return True


def _same_plain(left: Any, right: Any) -> bool:
    """Return whether two values of the same type are equal, for types that `_parts` does not take apart."""
    if isinstance(left, (torch.Tensor, torch.nn.Module)):
        return False
    if isinstance(left, (np.ndarray, np.generic)):
        alike = (left.dtype, left.shape) == (right.dtype, right.shape) and not left.dtype.hasobject
        return alike and left.tobytes() == right.tobytes()
    if isinstance(left, (float, complex)):
        return repr(left) == repr(right)  # NaN is NaN, and 0.0 isn't -0.0
    try:
        return bool(left == right)
    except Exception:  # values that can't be compared aren't equal
        return False


def _parts(value: Any) -> tuple[Any, Sequence[Any]] | None:
    """Take a container or function apart for a comparison: return (head, parts), or None for any other value.

    Two values of one type are equal if their heads are equal by ``==``, and their parts are equal one by one. The head
    of a dict is its keys, for example, and the head of a function includes its code.
    """
    further = getattr(value, "__dict__", None) or None  # attributes set on a function or on a subclass's instance
    if isinstance(value, FunctionType):
        captured = [_captured(cell) for cell in value.__closure__ or ()]
        identity = (value.__code__, id(value.__globals__))
        return identity, [value.__defaults__, value.__kwdefaults__, further, *captured]
    if isinstance(value, partial):
        return (), [value.func, value.args, value.keywords, further]
    if isinstance(value, MethodType):
        return (), [value.__func__, value.__self__]
    if isinstance(value, dict):
        factory = getattr(value, "default_factory", None)
        return list(value), [*value.values(), factory, further]  # in order: the first matching pattern counts
    if isinstance(value, (list, tuple)):
        return (), [*value, further]
    return _attributes(value) if is_dataclass(value) and not isinstance(value, type) else None


def _attributes(value: Any) -> tuple[Any, Sequence[Any]] | None:
    """Return (names, values) of the attributes by which a dataclass instance is compared.

    The result is None for a torch module. It is also None for an instance that isn't callable, if its class defines
    equality.
    """
    kind: Any = type(value)
    has_own = kind.__eq__ is not object.__eq__
    if isinstance(value, torch.nn.Module) or (has_own and not callable(value)):
        return None
    # Fields alone aren't enough: `__post_init__` and subclasses set further attributes, some of them in slots.
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

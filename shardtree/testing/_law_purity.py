"""The law of purity: a function leaves its arguments as they were, to the last container and bit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch

from ..errors import render_path
from ._bits import outline

T = TypeVar("T")


def check_pure(fn: Callable[..., T], *args: Any, **options: Any) -> T:
    """Return what a function returns, after checking that it changed none of its arguments.

    Containers must hold the very same objects in the same order; arrays and tensors must keep their bits, and tensors
    their version counter, which counts writes that change nothing too. So a container that the result shares with an
    argument is one that didn't change. Called again, the function must give the same.

    Args:
        fn: any function.
        args: its arguments.
        options: its keyword arguments.

    Raises:
        AssertionError: names the argument, the path in it and what changed.

    Examples:
        >>> check_pure(sorted, [3, 1, 2])
        [1, 2, 3]
        >>> check_pure(list.sort, [3, 1, 2])
        Traceback (most recent call last):
        AssertionError: sort changed its argument 0 at argument[0]
    """
    called = getattr(fn, "__name__", type(fn).__name__)
    given: dict[Any, Any] = dict([*enumerate(args), *options.items()])
    before = {name: (outline(value), _identities(value)) for name, value in given.items()}
    result = fn(*args, **options)
    for name, value in given.items():
        _check_unchanged(f"{called} changed its argument {name}", value, *before[name])
    assert _same(result, fn(*args, **options)), f"{called} returned another value when it was called again"
    return result


def _check_unchanged(what: str, value: Any, outline_before: Any, identities_before: Mapping[Any, Any]) -> None:
    place = _first_change(identities_before, _identities(value))
    assert place is None, f"{what} at {render_path(place or (), 'argument')}"
    assert outline(value) == outline_before, f"{what}: a value inside it"


def _same(left: Any, right: Any) -> bool:
    # Functions that make functions make new ones each time.
    return callable(left) or _without_functions(outline(left)) == _without_functions(outline(right))


def _without_functions(shape: Any) -> Any:
    if isinstance(shape, tuple) and len(shape) == 2 and isinstance(shape[0], type) and isinstance(shape[1], int):
        return shape[0]
    return type(shape)(map(_without_functions, shape)) if isinstance(shape, (list, tuple)) else shape


def _identities(value: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Return what stands at each path: which object, and a tensor's version."""
    version = value._version if isinstance(value, torch.Tensor) and not value.is_inference() else None
    found = {path: (id(value), version)}
    for entry, child in _children(value):
        found |= _identities(child, (*path, entry))
    return found


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple, deque)):
        return list(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return []


def _first_change(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> tuple[Any, ...] | None:
    changed = (path for path in [*before, *after] if before.get(path) != after.get(path))
    return next(iter(changed), None) if list(before.items()) != list(after.items()) else None

"""Enums, named tuples and dataclasses that a caller lets an archive have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, cast

from ...errors import UnsupportedValue, error_text
from .._nodes import exactly
from .._record import named_types, type_name
from ..pickles import Constructor


def constructors(types: Iterable[type]) -> dict[tuple[str, str], Constructor]:
    """Return what a pickle may call to make instances of these classes.

    No `__init__` runs, and of a dataclass only its fields are set.

    Args:
        types: enums, dataclasses and named tuples.

    Raises:
        UnsupportedValue: one is none of these.

    Examples:
        >>> from http import HTTPStatus
        >>> constructors([HTTPStatus])["http", "HTTPStatus"].make(200)
        <HTTPStatus.OK: 200>
    """
    return {(cls.__module__, cls.__qualname__): _constructor(cls) for cls in named_types(types).values()}


def _constructor(cls: type) -> Constructor:
    if issubclass(cls, Enum):
        return Constructor(_member_of(cls), keys=_hashed)
    if issubclass(cls, tuple):
        return Constructor(_tuple_of(cls))
    return Constructor(_empty_of(cls), _fill)


def _hashed(*values: Any) -> list[Any]:
    return [value for value in values if type(value).__hash__ is not None]


def _member_of(cls: type[Enum]) -> Callable[..., Enum]:
    def make(value: Any) -> Enum:
        try:
            return cls(value)
        except (ValueError, TypeError, KeyError):
            shown = repr(value)[:200] if type(value) in (int, str) else f"a {type(value).__name__}"
            raise _misfit(cls, f"value {shown}", "one of a member") from None

    return make


def _tuple_of(cls: type[tuple[Any, ...]]) -> Callable[..., Any]:
    names = cast(Any, cls)._fields

    def make(*items: Any) -> Any:
        if len(items) != len(names):
            raise _misfit(cls, f"{len(items)} fields", f"{len(names)}")
        return tuple.__new__(cls, items)

    return make


def _empty_of(cls: type) -> Callable[..., Any]:
    def make(*args: Any) -> Any:
        if args:
            raise TypeError(f"arguments for {type_name(cls)}")
        return object.__new__(cls)

    return make


def _fill(value: Any, state: Any) -> None:
    expected = [field.name for field in dataclasses.fields(value)]
    found = _fields(state, expected)
    missing = [name for name in expected if name not in found]
    if missing:
        raise _misfit(type(value), f"no field {missing[0]!r}", f"{expected}"[:200])
    for name in expected:
        object.__setattr__(value, name, found[name])


def _fields(state: Any, names: list[str]) -> dict[str, Any]:
    if type(state) is list:  # of a frozen dataclass with slots
        return dict(zip(names, state, strict=False))
    if type(state) is tuple:
        return {**(state[0] or {}), **(state[1] or {})}
    return exactly(dict, state)


def _misfit(cls: type, found: str, expected: str) -> UnsupportedValue:
    what = f"{type_name(cls)}: the class given in types isn't what was stored"
    return UnsupportedValue(error_text(what, found=found, expected=expected))

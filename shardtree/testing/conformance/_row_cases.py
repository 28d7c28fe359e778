"""What is promised by the rows themselves: that they fit their protocols, and which rows need which others."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from ...strategies import PROTOCOLS, Strategies, Strategy, StrategyAction, table_of
from ._subject import Case, Promise, Subject

# The law of the dispatch table: a backend's functions match the protocols of their rows.

_ANYTHING = (Any, object, inspect.Parameter.empty)


def check_rows(strategies: Strategies | None, backend: str, version: int) -> None:
    """Raise unless the functions of a backend's rows match `strategies.PROTOCOLS`.

    They may accept wider types and return narrower ones. Missing annotations match, and so do those that can't be
    resolved.

    Args:
        strategies: the dispatch table; None for the process's.
        backend: the format's name.
        version: the format's version.

    Raises:
        AssertionError: the backend has no row, or some don't match; names each of them.

    Examples:
        >>> from shardtree.strategies import default_strategies
        >>> check_rows(default_strategies, "safetensors", 1)
        >>> check_rows({(StrategyAction.LOAD_SHARDED, "cards", 1): lambda checkpoint: None}, "cards", 1)
        Traceback (most recent call last):
        AssertionError: rows of ('cards', 1) don't fit their protocols
          load_sharded: called with (checkpoint, shards): too many positional arguments
    """
    rows = {action: fn for (action, *found), fn in table_of(strategies).items() if found == [backend, version]}
    assert rows, f"no row is for {(backend, version)}"
    lines = [f"{action.value}: {problem}" for action, fn in rows.items() for problem in _problems(action, fn)]
    if lines:
        raise AssertionError("\n  ".join([f"rows of {(backend, version)} don't fit their protocols", *lines]))


def _problems(action: StrategyAction, fn: Strategy) -> Iterator[str]:
    found, protocol = _signature(fn), _signature(PROTOCOLS[action].__call__)
    asked = list(protocol.parameters.values())[1:]  # without self
    try:
        bound = found.bind(*asked)
    except TypeError as error:
        yield f"called with ({', '.join(each.name for each in asked)}): {error}"
        return
    for name, value in bound.arguments.items():
        parameter = found.parameters[name]
        for each in value if parameter.kind is parameter.VAR_POSITIONAL else [value]:
            if not _takes(parameter.annotation, each.annotation):
                yield f"{parameter} is asked to take {each}"
    if not _takes(protocol.return_annotation, found.return_annotation):
        yield f"returns {found.return_annotation}, expected {protocol.return_annotation}"


def _signature(fn: Strategy) -> inspect.Signature:
    try:
        return inspect.signature(fn, eval_str=True)
    except NameError:  # a name that is imported for type checkers only
        return inspect.signature(fn)


def _takes(wide: Any, narrow: Any) -> bool:
    """Return whether the narrow type is a subtype of the wide one, as type checkers see it."""
    if any(kind in _ANYTHING or isinstance(kind, (str, TypeVar)) for kind in (wide, narrow)):
        return True
    return all(any(_is_kind_of(one, other) for other in _members(wide)) for one in _members(narrow))


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _is_kind_of(narrow: Any, wide: Any) -> bool:
    plain = [NoneType if kind is None else get_origin(kind) or kind for kind in (narrow, wide)]
    if not all(isinstance(kind, type) for kind in plain):
        return True  # not classes, so that they can't be compared
    # Not strict: different classes, such as tuple and Sequence, can have different numbers of parameters.
    pairs = zip(get_args(wide), get_args(narrow), strict=False)
    return issubclass(*plain) and all(_takes(one, other) for one, other in pairs)


# Cases about rows: their signatures, and which rows need which others.

# What is saved must be loadable, and loads start from the metadata: a table without these rows would fail only when
# somebody loads the checkpoint.
_NEEDS = {
    StrategyAction.SAVE_SHARDED: (StrategyAction.LOAD_SHARDED,),
    StrategyAction.SAVE_COMMON: (StrategyAction.LOAD_COMMON,),
    StrategyAction.LOAD_SHARDED: (StrategyAction.LOAD_METADATA,),
    StrategyAction.RESOLVE: (StrategyAction.LOAD_SHARDED,),
    StrategyAction.COMMIT: (StrategyAction.SAVE_SHARDED,),
}


def signatures(subject: Subject) -> Iterator[Case]:
    """Yield the check of the rows' signatures."""
    rows = {
        (action, subject.backend, subject.version): found
        for action in StrategyAction
        if (found := subject.row(action)) is not None
    }
    yield Case("all rows", partial(check_rows, rows, subject.backend, subject.version))


def partners(subject: Subject) -> Iterator[Case]:
    """Yield a case for each row that needs another one."""
    for action, needed in _NEEDS.items():
        if subject.has(action):
            yield Case(action.value, partial(_check_partners, subject, needed))


def _check_partners(subject: Subject, needed: tuple[StrategyAction, ...]) -> None:
    missing = [action.value for action in needed if not subject.has(action)]
    assert not missing, f"there is no row for {', '.join(missing)}"


PROMISES = (
    Promise("rows fit their protocols", frozenset(), signatures),
    Promise("what is written can be read", frozenset(), partners),
)

"""Cases about a backend's dispatch-table rows: the signatures of their functions, and rows that need other rows."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import partial
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from ...shell.table import PROTOCOLS, Strategies, Strategy, StrategyAction, table_of
from ._subject import Case, Promise, Subject

# The law of the dispatch table: a backend's functions match the protocols of their rows.

_ANYTHING = (Any, object, inspect.Parameter.empty)


def check_rows(
    strategies: Strategies | None, backend: str, version: int, *, protocols: Mapping[Enum, type] | None = None
) -> None:
    """Raise unless the functions of a backend's rows match the protocols of their actions.

    The functions may accept wider types and return narrower ones. Missing annotations match, and so do those that can't
    be resolved.

    Args:
        strategies: Dispatch table; None for the process's.
        backend: Name of the format.
        version: Version of the format.
        protocols: Protocols of actions that the caller added, by action; rows of other added actions aren't checked.

    Raises:
        AssertionError: The backend has no row, or a row doesn't match; the error names each such row.

    Examples:
        >>> from shardtree.strategies import default_strategies
        >>> check_rows(default_strategies, "safetensors", 1)
        >>> check_rows({(StrategyAction.LOAD_SHARDED, "cards", 1): lambda checkpoint: None}, "cards", 1)
        Traceback (most recent call last):
        AssertionError: rows of ('cards', 1) do not fit their protocols
          load_sharded: called with (checkpoint, shards): too many positional arguments
    """
    table = table_of(strategies)
    rows = {action: table[action, *name] for action, *name in table if name == [backend, version]}
    assert rows, f"no rows for {(backend, version)}"
    all_protocols = dict[Enum, Any]([*PROTOCOLS.items(), *(protocols or {}).items()])
    lines = [
        f"{action.value}: {problem}"
        for action, fn in rows.items()
        if action in all_protocols
        for problem in _problems(all_protocols[action], fn)
    ]
    if lines:
        raise AssertionError("\n  ".join([f"rows of {(backend, version)} do not fit their protocols", *lines]))


def _problems(kind: Any, fn: Strategy) -> Iterator[str]:
    """Yield the differences between a function's signature and its protocol's, as text."""
    signature, protocol = _signature(fn), _signature(kind.__call__)
    parameters = list(protocol.parameters.values())[1:]  # without self
    try:
        binding = signature.bind(*parameters)
    except TypeError as error:
        yield f"called with ({', '.join(parameter.name for parameter in parameters)}): {error}"
        return
    for name, value in binding.arguments.items():
        parameter = signature.parameters[name]
        for argument in value if parameter.kind is parameter.VAR_POSITIONAL else [value]:
            if not _takes(parameter.annotation, argument.annotation):
                yield f"{parameter} must take {argument}"
    if not _takes(protocol.return_annotation, signature.return_annotation):
        yield f"returns {signature.return_annotation}, expected {protocol.return_annotation}"


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


# Rows that other rows need: what is saved must be loadable, and loads start from the metadata. A table without them
# would fail only when somebody loads the checkpoint.
_NEEDS = {
    StrategyAction.SAVE_SHARDED: (StrategyAction.LOAD_SHARDED,),
    StrategyAction.SAVE_COMMON: (StrategyAction.LOAD_COMMON,),
    StrategyAction.LOAD_SHARDED: (StrategyAction.LOAD_METADATA,),
    StrategyAction.RESOLVE: (StrategyAction.LOAD_SHARDED,),
    StrategyAction.PUBLISH: (StrategyAction.SAVE_SHARDED,),
}


def signatures(subject: Subject) -> Iterator[Case]:
    """Yield one case, which checks the signatures of the backend's functions in the dispatch table."""
    rows = {
        (action, subject.backend, subject.version): fn
        for action in subject.actions()
        if (fn := subject.row(action)) is not None
    }
    check = partial(check_rows, rows, subject.backend, subject.version, protocols=subject.protocols)
    yield Case("all rows", check)


def partners(subject: Subject) -> Iterator[Case]:
    """Yield a case for each dispatch-table row that needs another row, as saving needs loading.

    The case fails if the other row is missing.
    """
    for action, actions in _NEEDS.items():
        if subject.has(action):
            yield Case(action.value, partial(_check_partners, subject, actions))


def _check_partners(subject: Subject, actions: tuple[StrategyAction, ...]) -> None:
    missing = [action.value for action in actions if not subject.has(action)]
    assert not missing, f"there is no row for {', '.join(missing)}"


PROMISES = (
    Promise("rows fit their protocols", frozenset(), signatures),
    Promise("what is written can be read", frozenset(), partners),
)

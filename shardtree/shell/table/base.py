"""The dispatch table: strategies are plain functions, keyed by (action, backend, version).

Megatron-Core's strategy classes declare abilities by attributes and compatibility checks; here, a backend supports
exactly the actions that it has a row for. A table is a value: pass ``strategies=default_strategies | {row: function}``
to one call, or register a row for the whole process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import entry_points
from operator import attrgetter
from typing import TypeVar

from ...core.deferred import by_name, leaf
from ...core.geometry import as_int
from ...errors import StrategyError, error_text
from ..storage import Storage
from . import safetensors
from ._actions import Row, StoredRows, Strategies, Strategy, StrategyAction
from ._traits import METADATA_FILE, FormatTraits, seems_whole

Fn = TypeVar("Fn", bound=Strategy)

ENTRY_POINT_GROUP = "shardtree.strategies"


class StrategyTable(Mapping[Row, Strategy]):
    """A read-only dispatch table; ``|`` makes a new one, and ``print`` shows a grid of actions and backends.

    Args:
        rows: Mapping from (action, backend, version) to a function; it isn't copied. A function of our own formats may
            be given as an import path, which is imported on lookup: a program then loads only the formats that it uses.

    Raises:
        StrategyError: the argument isn't a mapping from rows to functions.

    Examples:
        >>> table = StrategyTable({(StrategyAction.LOAD_COMMON, "cards", 1): print})
        >>> print(table | {(StrategyAction.SAVE_COMMON, "cards", 2): print})
                     cards 1  cards 2
        load_common     x
        save_common              x
    """

    __slots__ = ("_rows",)

    def __init__(self, rows: StoredRows) -> None:
        self._rows = _checked_rows(rows)

    def __getitem__(self, row: Row) -> Strategy:
        """Return the function of a row, after importing it if the table has only its import path."""
        strategy = self._rows[row]
        return _function_at(strategy) if isinstance(strategy, str) else strategy

    def __contains__(self, row: object) -> bool:
        """Return whether a row exists, without importing anything."""
        return row in self._rows

    def __iter__(self) -> Iterator[Row]:
        """Return an iterator over the rows."""
        return iter(self._rows)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def __or__(self, other: Strategies) -> StrategyTable:
        """Return the union of both tables; the other's rows take precedence."""
        return StrategyTable({**self._rows, **_rows_of(other)})

    def __ror__(self, other: Strategies) -> StrategyTable:
        """Return the union of both tables; this table's rows take precedence."""
        return StrategyTable({**_rows_of(other), **self._rows})

    def __repr__(self) -> str:
        backends = sorted({row[1:] for row in self})
        return f"StrategyTable({len(self)} rows: {', '.join(f'{name} {version}' for name, version in backends)})"

    def __str__(self) -> str:
        backends = sorted({row[1:] for row in self})
        # Our own actions come in the order of their definition, then the users' actions by name.
        actions: list[Enum] = [action for action in StrategyAction if any(row[0] is action for row in self)]
        actions += sorted({row[0] for row in self} - {*actions}, key=attrgetter("value"))
        heads = [f"{name} {version}" for name, version in backends]
        width = max((len(action.value) for action in actions), default=0)
        lines = ["  ".join([" " * width, *heads])]
        for action in actions:
            marks = ["x" if (action, *backend) in self else " " for backend in backends]
            cells = (mark.center(len(head)) for mark, head in zip(marks, heads, strict=True))
            lines.append("  ".join([action.value.ljust(width), *cells]).rstrip())
        return "\n".join(lines)


@cache
def _function_at(place: str) -> Strategy:
    function: Strategy = by_name(place)
    return function


def _rows_of(table: Strategies) -> StoredRows:
    return table._rows if isinstance(table, StrategyTable) else _checked_rows(table)


def _checked_rows(table: StoredRows) -> StoredRows:
    """Return a table unchanged, after checking its rows and functions.

    Raises:
        StrategyError: the table isn't a mapping, or has an invalid row, or a value that isn't a function.
    """
    fix = "Pass default_strategies | {(action, backend, version): function}."
    if not isinstance(table, Mapping):
        heading = "strategies: invalid dispatch table"
        raise StrategyError(error_text(heading, found=type(table).__name__, expected="a mapping", fix=fix))
    wrong = [
        row
        for row, strategy in table.items()
        if not (_is_row(row) and (callable(strategy) or (isinstance(strategy, str) and ":" in strategy)))
    ]
    if wrong:
        heading = "strategies: the dispatch table has invalid entries"
        lines = [f"{row!r}: {type(table[row]).__name__}" for row in wrong]
        expected = "(StrategyAction, backend name, version) and a function"
        raise StrategyError(error_text(heading, offenders=lines, expected=expected, fix=fix))
    return table


def _is_row(row: object) -> bool:
    if not isinstance(row, tuple) or len(row) != 3:
        return False
    action, backend, version = row
    return _is_action(action) and isinstance(backend, str) and as_int(version) is not None


def _is_action(action: object) -> bool:
    # A plain string isn't an action: most likely the name of one was passed instead of the Enum's member.
    return isinstance(action, Enum) and isinstance(action.value, str)


_rows: dict[Row, Strategy | str] = {**safetensors.ROWS, **leaf("formats")()}
_OURS = frozenset(row[1:] for row in _rows)

default_strategies = StrategyTable(_rows)
"""The dispatch table of the process, with every registered row. It is read-only; ``|`` makes another table."""


def register_default_strategy(
    action: Enum, backend: str, version: int, strategy: Strategy | None = None, *, override: bool = False
) -> Callable[[Fn], Fn]:
    """Register a function for a row of this process's table; also a decorator.

    Args:
        action: A `StrategyAction`, whose protocol (such as `LoadCommon`) is the function's signature; or an action of
            the caller's own, a member of any Enum with a string as its value.
        backend: Name of the format.
        version: Version of the format.
        strategy: The function; None if this is used as a decorator.
        override: Whether to replace the function of an existing row.

    Raises:
        StrategyError: the row is invalid, or already has another function.

    Examples:
        >>> @register_default_strategy(StrategyAction.LOAD_COMMON, "example", 1)
        ... def load_common(checkpoint):
        ...     return {}
        >>> get_default_strategy(StrategyAction.LOAD_COMMON, "example", 1) is load_common
        True
        >>> del _rows[StrategyAction.LOAD_COMMON, "example", 1]
    """
    row = _checked_row(action, backend, version)

    def register(function: Fn) -> Fn:
        other = default_strategies.get(row)
        if other is not None and other is not function and not override:
            name = f"{other.__module__}.{getattr(other, '__qualname__', other)}"
            fix = "Pass override=True to replace it, or pass strategies=default_strategies | {...} to a save or load."
            raise StrategyError(error_text(f"register: {_row_text(row)} already has a function", found=name, fix=fix))
        _rows[row] = function
        return function

    if strategy is not None:
        register(strategy)
    return register


def get_default_strategy(action: Enum, backend: str, version: int, *, strategies: Strategies | None = None) -> Strategy:
    """Return the function of a row.

    If the table lacks the row, the entry points of installed packages are loaded, once in a process.

    Args:
        action: Action of the row.
        backend: Name of the format.
        version: Version of the format.
        strategies: Dispatch table; None for the process's.

    Raises:
        StrategyError: there is no such row; the error lists the formats that have the action.

    Examples:
        >>> table = {(StrategyAction.SAVE_SHARDED, "safetensors", 1): print}
        >>> get_default_strategy(StrategyAction.SAVE_SHARDED, "punch cards", 1, strategies=table)
        Traceback (most recent call last):
        ...
        shardtree.errors.StrategyError: no strategy for save_sharded with backend 'punch cards', version 1
          save_sharded exists for ('safetensors', 1)
          Install the package of this backend, or add its functions with register_default_strategy or strategies=.
    """
    row = _checked_row(action, backend, version)
    strategy = find_strategy(*row, strategies=strategies)
    if strategy is None:
        have = ", ".join(map(repr, formats_with(action, strategies=strategies)))
        errors = packages().errors
        fix = "Install the package of this backend, or add its functions with register_default_strategy or strategies=."
        offenders = [f"{action.value} exists for {have or 'no backend'}", *errors]
        error = StrategyError(error_text(f"no strategy for {_row_text(row)}", offenders=offenders, fix=fix))
        raise error from next(iter(errors.values()), None)
    return strategy


def find_strategy(action: Enum, backend: str, version: int, *, strategies: Strategies | None = None) -> Strategy | None:
    """Return the function of a row, or None if the backend doesn't support the action.

    Examples:
        >>> find_strategy(StrategyAction.LOAD_OBJECTS, "punch cards", 1) is None
        True
    """
    row = (action, backend, version)
    # Packages add formats and actions: none is imported because one of our own formats lacks one of our rows.
    is_ours = isinstance(action, StrategyAction) and row[1:] in _OURS
    # The process's table is no fallback, since the caller's table may lack a row on purpose.
    return table_of(strategies).get(row) or (None if is_ours else packages().rows.get(row))


def formats_with(action: Enum, *, strategies: Strategies | None = None) -> tuple[tuple[str, int], ...]:
    """Return the formats that have a row for an action, as sorted (backend, version) pairs.

    Examples:
        >>> ("safetensors", 1) in formats_with(StrategyAction.SAVE_SHARDED)
        True
    """
    if strategies is None:
        packages()  # registers the formats of installed packages
    rows = sorted(table_of(strategies), key=lambda row: (row[0].value, *row[1:]))
    return tuple((name, version) for other, name, version in rows if other is action)


def traits_of(backend: str, version: int, strategies: Strategies | None = None) -> FormatTraits:
    """Return the traits from a format's DESCRIBE row, or the defaults if it has none.

    Examples:
        >>> traits_of("huggingface", 1).is_guess, traits_of("punch cards", 1).is_guess
        (True, False)
    """
    describe = find_strategy(StrategyAction.DESCRIBE, backend, version, strategies=strategies)
    traits: FormatTraits = FormatTraits() if describe is None else describe()
    return traits


def deciding_files(strategies: Strategies | None = None) -> tuple[str, ...]:
    """Return the name patterns of all formats' deciding files, which make a folder a checkpoint.

    Examples:
        >>> ".metadata" in deciding_files()
        True
    """
    patterns = {pattern for traits in _all_traits(strategies) for pattern in traits.decided_by}
    return tuple(sorted(patterns | {METADATA_FILE}))


def manifests(strategies: Strategies | None = None) -> tuple[str, ...]:
    """Return the names of all formats' manifests: files in which other programs store the hashes of a checkpoint.

    Examples:
        >>> manifests()
        ('integrity.json',)
    """
    return tuple(sorted({traits.manifest for traits in _all_traits(strategies)} - {""}))


def is_whole(strategies: Strategies | None, storage: Storage, name: str) -> bool:
    """Return whether a file that makes a folder a checkpoint is complete rather than truncated.

    The first format whose patterns of such files (`FormatTraits.decided_by`) match the file's name judges this.

    Args:
        strategies: Dispatch table; None for the process's.
        storage: Folder of the file.
        name: Name of the file.

    Raises:
        CheckpointingException: the format has found the file truncated, and raises instead of returning False.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> folder = MemoryStorage()
        >>> folder.replace(".metadata", b"the beginning", durable=False)
        >>> is_whole(None, folder, ".metadata")
        False
    """
    all_traits = _all_traits(strategies)
    fits = (one.is_whole for one in all_traits if any(fnmatchcase(name, pattern) for pattern in one.decided_by))
    return next(fits, seems_whole)(storage, name)


def _all_traits(strategies: Strategies | None) -> list[FormatTraits]:
    rows = {(name, version) for _, name, version in table_of(strategies)}
    return [traits_of(*row, strategies) for row in sorted(rows)]


def table_of(strategies: Strategies | None) -> Strategies:
    """Return the dispatch table that a caller passed, after a check, or the process's table for None.

    Raises:
        StrategyError: the argument isn't a dispatch table.

    Examples:
        >>> table_of(None) is default_strategies, table_of({})
        (True, {})
    """
    if strategies is None:
        return default_strategies
    if not isinstance(strategies, StrategyTable):
        _checked_rows(strategies)
    return strategies


@dataclass(frozen=True, slots=True)
class Packages:
    """Formats that installed packages register through entry points.

    Attributes:
        rows: Rows that the entry points registered while they were loaded.
        errors: Exceptions of entry points that can't be loaded, by a text that names the entry point and the reason.
    """

    rows: Strategies
    errors: Mapping[str, Exception]


@cache
def packages() -> Packages:
    """Load the entry points of installed packages, once in a process, and return the formats that they register.

    Failures cause a warning, and are named in the errors about missing rows.
    """
    before = set(default_strategies)
    errors: dict[str, Exception] = {}
    # This runs only if a format isn't ours, so that a package that isn't needed can't slow down or break a program.
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            entry_point.load()
        except Exception as error:
            problem = f"entry point {entry_point.name!r} ({entry_point.value}) cannot be loaded"
            errors[f"{problem}: {type(error).__name__}: {error}"] = error
    if errors:
        fix = "Repair these packages, or uninstall them if their formats are not needed."
        text = error_text("strategies: formats of broken packages are not available", offenders=list(errors), fix=fix)
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return Packages({row: default_strategies[row] for row in default_strategies if row not in before}, errors)


def _checked_row(action: Enum, backend: str, version: int) -> Row:
    number = as_int(version)
    if _is_action(action) and isinstance(backend, str) and number is not None:
        return action, backend, number
    row = f"({action!r}, {backend!r}, {version!r})"
    raise StrategyError(
        error_text("invalid action, backend or version", found=row, expected="(StrategyAction, backend name, version)")
    )


def _row_text(row: Row) -> str:
    return f"{row[0].value} with backend {row[1][:100]!r}, version {row[2]}"

"""The dispatch table: strategies are plain functions, keyed by (action, backend, version).

Megatron-Core's strategy classes have attributes and compatibility checks for what a backend can do; here it can do what
it has a row for. A table is a value: pass ``strategies=default_strategies | {row: function}`` to one call, or register
a row for the whole process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Set
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
    """A dispatch table that prints as one: an action a line, a backend a column. Read-only; ``|`` makes a new one.

    Args:
        rows: from (action, backend, version) to a function; looked at, not copied. Where a row of ours is a name, its
            module is imported when the row is looked up: a program loads the formats that it uses.

    Raises:
        StrategyError: it isn't a mapping of rows to functions.

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
        """Return the function of a row."""
        strategy = self._rows[row]
        return _function_at(strategy) if isinstance(strategy, str) else strategy

    def __contains__(self, row: object) -> bool:
        """Return whether there is a row; nothing is imported."""
        return row in self._rows

    def __iter__(self) -> Iterator[Row]:
        """Return all rows."""
        return iter(self._rows)

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self._rows)

    def __or__(self, other: Strategies) -> StrategyTable:
        """Return a table with the other's rows in it, which win."""
        return StrategyTable({**self._rows, **_rows_of(other)})

    def __ror__(self, other: Strategies) -> StrategyTable:
        """Return a table of both, in which these rows win."""
        return StrategyTable({**_rows_of(other), **self._rows})

    def __repr__(self) -> str:
        backends = sorted({row[1:] for row in self})
        return f"StrategyTable({len(self)} rows: {', '.join(f'{name} {version}' for name, version in backends)})"

    def __str__(self) -> str:
        backends = sorted({row[1:] for row in self})
        actions = _in_order({row[0] for row in self})
        heads = [f"{name} {version}" for name, version in backends]
        width = max((len(action.value) for action in actions), default=0)
        lines = ["  ".join([" " * width, *heads])]
        for action in actions:
            marks = ["x" if (action, *each) in self else " " for each in backends]
            cells = (mark.center(len(head)) for mark, head in zip(marks, heads, strict=True))
            lines.append("  ".join([action.value.ljust(width), *cells]).rstrip())
        return "\n".join(lines)


def _in_order(actions: Set[Enum]) -> list[Enum]:
    """Return our own actions in the order of their definition, then those that users added, by name."""
    ours = [action for action in StrategyAction if action in actions]
    return [*ours, *sorted(actions - {*ours}, key=attrgetter("value"))]


@cache
def _function_at(place: str) -> Strategy:
    function: Strategy = by_name(place)
    return function


def _rows_of(table: Strategies) -> StoredRows:
    return table._rows if isinstance(table, StrategyTable) else _checked_rows(table)


def _checked_rows(table: StoredRows) -> StoredRows:
    """Return a table, if it is one: what a caller writes may lack a part of a row.

    Raises:
        StrategyError: it isn't a mapping, or has a key that isn't a row, or a value that isn't a function.
    """
    fix = "Pass default_strategies | {(action, backend, version): function}."
    if not isinstance(table, Mapping):
        what = "not a dispatch table"
        raise StrategyError(error_text(what, found=type(table).__name__, expected="a mapping", fix=fix))
    wrong = [
        row for row, strategy in table.items() if not (_is_row(row) and (callable(strategy) or _is_ours(strategy)))
    ]
    if wrong:
        what = "a dispatch table with invalid entries"
        lines = [f"{row!r}: {type(table[row]).__name__}" for row in wrong]
        expected = "(StrategyAction, backend name, version) and a function"
        raise StrategyError(error_text(what, offenders=lines, expected=expected, fix=fix))
    return table


def _is_row(row: object) -> bool:
    if not isinstance(row, tuple) or len(row) != 3:
        return False
    action, backend, version = row
    return _is_action(action) and isinstance(backend, str) and as_int(version) is not None


def _is_action(action: object) -> bool:
    # A plain string isn't an action: it is rather one of ours, whose name was passed in place of the member.
    return isinstance(action, Enum) and isinstance(action.value, str)


def _is_ours(strategy: object) -> bool:
    return isinstance(strategy, str) and ":" in strategy


_rows: dict[Row, Strategy | str] = {**safetensors.ROWS, **leaf("formats")()}

default_strategies = StrategyTable(_rows)
"""Every registered row: prints as a table. Read-only; ``default_strategies | {...}`` makes a table of its own."""


def register_default_strategy(
    action: Enum, backend: str, version: int, strategy: Strategy | None = None, *, override: bool = False
) -> Callable[[Fn], Fn]:
    """Register a function for a row, for this process; works as a decorator too.

    Args:
        action: a `StrategyAction`, whose protocol is the function's signature; or an action of the caller's own, a
            member of an Enum whose value is a string.
        backend: the format's name.
        version: the format's version.
        strategy: the function; None if this is used as a decorator.
        override: replace a row that is taken.

    Raises:
        StrategyError: the row is taken, or isn't a row.

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
            fix = "Pass override=True to replace it, or strategies=default_strategies | {...} to one call."
            raise StrategyError(
                error_text(f"register: {_row_text(row)} is taken", found=name, expected="a free row", fix=fix)
            )
        _rows[row] = function
        return function

    if strategy is not None:
        register(strategy)
    return register


def get_default_strategy(action: Enum, backend: str, version: int, *, strategies: Strategies | None = None) -> Strategy:
    """Return the function of a row.

    A row that is missing from the process's table is looked for once among the entry points of installed packages.

    Args:
        action: what to do.
        backend: the format's name.
        version: the format's version.
        strategies: the table; None for the process's.

    Raises:
        StrategyError: there is no such row; lists the backends and versions that have that action.

    Examples:
        >>> table = {(StrategyAction.SAVE_SHARDED, "safetensors", 1): print}
        >>> get_default_strategy(StrategyAction.SAVE_SHARDED, "punch cards", 1, strategies=table)
        Traceback (most recent call last):
        ...
        shardtree.errors.StrategyError: no strategy for save_sharded with backend 'punch cards', version 1
          save_sharded exists for ('safetensors', 1)
          Install the package that brings this backend, register_default_strategy a function, or pass strategies=.
    """
    row = _checked_row(action, backend, version)
    strategy = find_strategy(*row, strategies=strategies)
    if strategy is None:
        have = ", ".join(map(repr, formats_with(action, strategies=strategies)))
        errors = _packages().errors
        fix = "Install the package that brings this backend, register_default_strategy a function, or pass strategies=."
        offenders = [f"{action.value} exists for {have or 'no backend'}", *errors]
        error = StrategyError(error_text(f"no strategy for {_row_text(row)}", offenders=offenders, fix=fix))
        raise error from next(iter(errors.values()), None)
    return strategy


def find_strategy(action: Enum, backend: str, version: int, *, strategies: Strategies | None = None) -> Strategy | None:
    """Return the function of a row, None if there is none: whether a backend can do something.

    Examples:
        >>> find_strategy(StrategyAction.LOAD_OBJECTS, "punch cards", 1) is None
        True
    """
    row = (action, backend, version)
    # Never from the process's table: the caller's may lack a row on purpose.
    return table_of(strategies).get(row) or _packages().rows.get(row)


def formats_with(action: Enum, *, strategies: Strategies | None = None) -> tuple[tuple[str, int], ...]:
    """Return the formats that have a row for an action, as (backend, version), sorted; installed packages' too.

    Examples:
        >>> ("safetensors", 1) in formats_with(StrategyAction.SAVE_SHARDED)
        True
    """
    if strategies is None:
        _packages()  # which registers them
    rows = sorted(table_of(strategies), key=_order)
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
    """Return the patterns of all formats' deciding files.

    Examples:
        >>> ".metadata" in deciding_files()
        True
    """
    patterns = {pattern for traits in _all_traits(strategies) for pattern in traits.decided_by}
    return tuple(sorted(patterns | {METADATA_FILE}))


def manifests(strategies: Strategies | None = None) -> tuple[str, ...]:
    """Return the names of all formats' manifests.

    Examples:
        >>> manifests()
        ('integrity.json',)
    """
    return tuple(sorted({traits.manifest for traits in _all_traits(strategies)} - {""}))


def is_whole(strategies: Strategies | None, storage: Storage, name: str) -> bool:
    """Return whether a file that decides ends as one of its kind does, by the first format that it decides for.

    Args:
        strategies: Dispatch table; None for the process's.
        storage: Folder of the file.
        name: Name of the file.

    Raises:
        CheckpointingException: It doesn't.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> folder = MemoryStorage()
        >>> folder.replace(".metadata", b"the beginning", durable=False)
        >>> is_whole(None, folder, ".metadata")
        False
    """
    fits = (traits.is_whole for traits in _all_traits(strategies) if _decides(name, traits))
    return next(fits, seems_whole)(storage, name)


def _decides(name: str, traits: FormatTraits) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in traits.decided_by)


def _all_traits(strategies: Strategies | None) -> list[FormatTraits]:
    rows = {(name, version) for _, name, version in table_of(strategies)}
    return [traits_of(*row, strategies) for row in sorted(rows)]


def table_of(strategies: Strategies | None) -> Strategies:
    """Return the dispatch table of an argument: the process's for None.

    Raises:
        StrategyError: it isn't a table.

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
class _Packages:
    """What installed packages bring.

    Attributes:
        rows: those that entry points registered while they were imported.
        errors: what names the entry points that can't be imported, and why.
    """

    rows: Strategies
    errors: Mapping[str, Exception]


@cache
def _packages() -> _Packages:
    """Return what installed packages bring; one that can't be imported is a warning, and in errors on missing rows."""
    before = set(default_strategies)
    errors: dict[str, Exception] = {}
    # Only when a row is missing: a package that isn't needed can't slow down or break a program.
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            entry_point.load()
        except Exception as error:
            what = f"entry point {entry_point.name!r} ({entry_point.value}) can't be loaded"
            errors[f"{what}: {type(error).__name__}: {error}"] = error
    if errors:
        fix = "Their formats are missing. Repair or uninstall the packages that bring them."
        text = error_text("strategies: packages that are broken", offenders=list(errors), fix=fix)
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return _Packages({row: default_strategies[row] for row in default_strategies if row not in before}, errors)


def _checked_row(action: Enum, backend: str, version: int) -> Row:
    number = as_int(version)
    if _is_action(action) and isinstance(backend, str) and number is not None:
        return action, backend, number
    row = f"({action!r}, {backend!r}, {version!r})"
    raise StrategyError(
        error_text("not a row of the table", found=row, expected="(StrategyAction, backend name, version)")
    )


def _row_text(row: Row) -> str:
    return f"{row[0].value} with backend {row[1][:100]!r}, version {row[2]}"


def _order(row: Row) -> tuple[str, str, int]:
    return row[0].value, row[1], row[2]

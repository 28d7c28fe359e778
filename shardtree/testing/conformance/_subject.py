"""The backend under test, and functions that save and load trees with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

from ...errors import RemoteError, StorageError, StrategyError, UnsupportedValue
from ...inspection import open_checkpoint
from ...live import simulate
from ...shell.checkpoint import is_checkpoint
from ...shell.checkpoint import load as st_load
from ...shell.checkpoint import save as st_save
from ...shell.storage import Directory, Storage, storage_at
from ...shell.table import (
    Checkpoint,
    SaveOptions,
    Strategies,
    Strategy,
    StrategyAction,
    default_strategies,
    find_strategy,
    table_of,
)
from .._layouts import Layout
from .._states import GlobalState, check_loaded, rank_tree, ranks_of, target_tree

_REFUSALS = (UnsupportedValue, StrategyError, StorageError)

Layouts = Mapping[str, Layout]
Trees = Sequence[Any]
Writer = Callable[[Trees, Directory], None]
SaveTrees = Callable[..., Checkpoint]
"""Function that saves trees, one for each rank, with the backend under test, and returns the checkpoint."""
ActionCheck = Callable[[Any, SaveTrees], None]
"""Check of an added action: a function of a row's function and a `SaveTrees` that raises AssertionError if it fails."""


class Refused(Exception):
    """A backend refused a state that its format can't represent: it raised one of our errors and left no checkpoint."""


@dataclass(slots=True, eq=False)
class Subject:
    """A backend under test.

    A row of the dispatch table is the backend's function for one action.

    Attributes:
        backend: Name of the format.
        version: Version of the format.
        strategies: Dispatch table; None for the process's.
        directory: Function that returns a new place for a checkpoint.
        save: Function that writes all ranks' trees to a place, for a format without a row for saving; else None.
        examples: Number of random states to try.
        protocols: Protocols of actions that the caller added, by action.
        holds_common: Whether the format stores plain values; None until that is tried.
    """

    backend: str
    version: int
    strategies: Strategies | None
    directory: Callable[[], Directory]
    save: Writer | None
    examples: int
    protocols: Mapping[Enum, type] = field(default_factory=dict)
    holds_common: bool | None = None

    def row(self, action: Enum) -> Strategy | None:
        """Return the backend's function for an action from the dispatch table; None if it has none."""
        return find_strategy(action, self.backend, self.version, strategies=self.strategies)

    def has(self, action: Enum) -> bool:
        """Return whether the dispatch table has a row of the backend for an action."""
        return self.row(action) is not None

    def actions(self) -> list[Enum]:
        """Return the actions for which the backend has functions: ours, then those that the table's owner added."""
        ours = [action for action in StrategyAction if self.has(action)]
        subject = [self.backend, self.version]
        added = [action for action, *name in table_of(self.strategies) if name == subject and action not in ours]
        return [*ours, *sorted(added, key=lambda action: str(action.value))]

    def with_row(self, action: Enum, function: Strategy) -> Subject:
        """Return a subject whose dispatch table has another function for an action of the backend."""
        table = default_strategies if self.strategies is None else self.strategies
        return replace(self, strategies={**table, (action, self.backend, self.version): function})


@dataclass(frozen=True, slots=True)
class Case:
    """A single test.

    Attributes:
        name: Short description.
        check: Function that raises AssertionError if the test fails, and Refused if the format can't represent the
            state.
        required: Whether no format may refuse the case.
    """

    name: str
    check: Callable[[], None]
    required: bool = False


@dataclass(frozen=True, slots=True)
class Promise:
    """A property that a backend must have if it has functions for certain actions in its dispatch table.

    Such a function is called a row of the table.

    Attributes:
        name: The property, in words.
        rows: Actions that all need a row, or else the backend doesn't make this promise.
        cases: Function that yields the tests of a backend, simple ones first.
        saves: Whether the promise is about saving; a backend without a row for saving doesn't make it.
    """

    name: str
    rows: frozenset[Enum]
    cases: Callable[[Subject], Iterator[Case]]
    saves: bool = False


def together_or_each(together: Callable[[], None], cases: Iterator[Case]) -> Iterator[Case]:
    """Yield one case that passes if `together` passes, otherwise the single cases, to show which ones fail."""
    # One save and load of everything is much faster. If it fails, the single cases show which values are to blame.
    try:
        together()
    except Refused:
        yield from cases
    except Exception as error:
        yield from cases
        yield Case("all at once", partial(raising, error))
    else:
        yield Case("all at once", lambda: None)


def raising(error: Exception) -> None:
    """Raise an error, for a case that failed before its check."""
    raise error


def saver(subject: Subject) -> Callable[..., Any]:
    """Return a function like `save` that writes shards with the backend.

    If the dispatch table has no row for saving the backend's shards, it writes the common values with the backend.
    """
    name = (subject.backend, subject.version)
    choices = (name, None) if subject.has(StrategyAction.SAVE_SHARDED) else (None, name)

    # Durability takes time, and is a property of the storage, not of the format.
    fast = SaveOptions(durable=False)

    def save(tree: Any, place: Directory, options: SaveOptions = fast, **keywords: Any) -> Any:
        return st_save(tree, place, *choices, strategies=subject.strategies, options=options, **keywords)

    return save


def loader(subject: Subject) -> Callable[..., Any]:
    """Return a function like `load` that uses the backend's dispatch table."""
    return partial(st_load, strategies=subject.strategies)


def save_trees(subject: Subject, trees: Trees, place: Directory | None = None, **options: Any) -> Storage:
    """Save the ranks' trees, and return the storage.

    Raises:
        Refused: The format can't represent the trees.
        AssertionError: The format refused the trees, but left a checkpoint.
    """
    to = storage_at(subject.directory() if place is None else place)
    try:
        if subject.save is not None:
            subject.save(trees, to)
        else:
            save = saver(subject)
            simulate(len(trees), lambda world: save(trees[world.rank], to, world=world, **options))
    except Exception as error:
        if not isinstance(error, _REFUSALS):
            raise
        # A refusal must come before the commit, or the checkpoint would count without the refused values.
        left = place is None and is_checkpoint(to, strategies=subject.strategies)
        assert not left, f"it was refused ({_first_line(error)}), but a checkpoint is left"
        raise Refused(_first_line(error)) from error
    return to


def save_checkpoint(subject: Subject, *trees: Any) -> Checkpoint:
    """Return the checkpoint that the backend writes for trees, one for each rank.

    Raises:
        Refused: The format can't represent the trees.
    """
    return open_checkpoint(save_trees(subject, trees), strategies=subject.strategies).checkpoint


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's text; for a RemoteError, that of the first rank that failed."""
    if isinstance(error, RemoteError) and error.failures:
        return next(iter(error.failures.values())).splitlines()[0]
    return (str(error).splitlines() or [type(error).__name__])[0]


def load_trees(subject: Subject, targets: Trees, place: Directory, **options: Any) -> list[Any]:
    """Load each rank's target on simulated ranks, and return the ranks' trees."""
    load = loader(subject)
    return simulate(len(targets), lambda world: load(targets[world.rank], place, world=world, **options))


def trees_of(state: GlobalState, layout: Layouts, ranks: int | None = None) -> list[Any]:
    """Return the trees that the ranks save for a state, one for each rank."""
    count = ranks_of(layout) if ranks is None else ranks
    return [rank_tree(state, layout, rank) for rank in range(count)]


def targets_of(state: GlobalState, layout: Layouts) -> list[Any]:
    """Return the load targets of a state, one for each rank: their trees without data."""
    return [target_tree(state, layout, rank) for rank in range(ranks_of(layout))]


def check_there(subject: Subject, state: GlobalState, layout: Layouts, place: Directory, **options: Any) -> None:
    """Raise unless a checkpoint that is loaded in a layout gives the expected state."""
    targets = targets_of(state, layout)
    check_loaded(state, targets, load_trees(subject, targets, place, **options))


def check_reloaded(subject: Subject, state: GlobalState, save_layout: Layouts, load_layout: Layouts) -> None:
    """Raise unless a state that is saved in one layout and loaded in another is unchanged."""
    check_there(subject, state, load_layout, save_trees(subject, trees_of(state, save_layout)))


def only(state: GlobalState, *keys: str) -> GlobalState:
    """Return a state with only some of its tensors."""
    return replace(state, tensors={key: state.tensors[key] for key in keys})

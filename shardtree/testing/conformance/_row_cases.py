"""Cases about rows: their signatures, and which rows need which others."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ...strategies import StrategyAction
from .._rows import check_rows
from ._subject import Case, Promise, Subject

# What is saved must be loadable, and loads start from the metadata: a table without these rows would fail only when
# somebody loads the checkpoint.
_NEEDS = {
    StrategyAction.SAVE_SHARDED: (StrategyAction.LOAD_SHARDED,),
    StrategyAction.SAVE_OBJECTS: (StrategyAction.LOAD_OBJECTS,),
    StrategyAction.SAVE_COMMON: (StrategyAction.LOAD_COMMON,),
    StrategyAction.LOAD_SHARDED: (StrategyAction.LOAD_METADATA,),
    StrategyAction.EXPLAIN: (StrategyAction.LOAD_SHARDED,),
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

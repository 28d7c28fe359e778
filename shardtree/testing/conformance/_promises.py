"""All promises that `check_strategy` tests, in the order of its report, and the names of each action's promises."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from functools import partial

from ...errors import StrategyError, error_text
from ...shell.table import StrategyAction
from . import _action_cases, _files, _layout_cases, _row_cases, _tensor_cases, _value_cases
from ._subject import ActionCheck, Case, Promise, Subject, save_checkpoint

# Plain named cases come first, Hypothesis last: it finds unexpected cases, but formats are known to break at flat
# ranges, replicas and empty shards. Named cases run in the same order each time, fail with a name, and need no
# shrinking.
PROMISES: tuple[Promise, ...] = (
    *_row_cases.PROMISES,
    *_layout_cases.PROMISES,
    *_tensor_cases.PROMISES,
    *_value_cases.PROMISES,
    *_files.PROMISES,
    *_action_cases.PROMISES,
)

_SAVES = (
    "a save that dies leaves no checkpoint, or a whole one",
    "what is left of a cut file is not loaded as if it were whole",
)

OF_ACTIONS: Mapping[StrategyAction, tuple[str, ...]] = {
    StrategyAction.LOAD_COMMON: ("the common state comes back as it was", "common values keep their places"),
    StrategyAction.LOAD_SHARDED: (
        *(promise.name for promise in (*_layout_cases.PROMISES, *_tensor_cases.PROMISES, *_layout_cases.RANDOM)),
        "explain says what a load would do",
    ),
    StrategyAction.LOAD_OBJECTS: ("objects come back, each as itself", "metadata names every object"),
    StrategyAction.LOAD_METADATA: ("metadata says what was saved", "explain says what a load would do"),
    StrategyAction.PARSE: ("parsed metadata serves other ranks",),
    StrategyAction.RESOLVE: ("ranks that resolve together load the same",),
    StrategyAction.SAVE_COMMON: ("the common state comes back as it was", *_SAVES),
    StrategyAction.SAVE_SHARDED: (
        *(promise.name for promise in _layout_cases.PROMISES),
        "any strides are saved",
        "lazy tensors are saved",
        "nothing is written before the request runs",
        *_SAVES,
    ),
    StrategyAction.REMOVE_SHARDED: ("removal takes what has the prefix, and no more",),
    StrategyAction.VERIFY: ("verify sees flipped bits, or says that it cannot",),
    StrategyAction.RECOGNIZE: ("the format is recognised, and nothing else",),
    StrategyAction.PUBLISH: ("the last step makes the checkpoint",),
    StrategyAction.LIST_FILES: (
        "the checkpoint's files are listed, and no others",
        "a checkpoint is replaced as a whole, and only when asked",
    ),
    StrategyAction.DESCRIBE: ("traits are those of a checkpoint's files",),
}
"""Names of the promises of each action, which a backend with a row for it must keep.

The promises about rows' signatures and partners hold for all actions.
"""


def added_promises(checks: Mapping[Enum, ActionCheck]) -> list[Promise]:
    """Return a promise for each action that the caller added; the caller's check tests it."""
    return [
        Promise(f"{action.value} keeps its promise", frozenset({action}), partial(_of_added, action, check))
        for action, check in checks.items()
    ]


def _of_added(action: Enum, check: ActionCheck, subject: Subject) -> Iterator[Case]:
    yield Case("its check", partial(check, subject.row(action), partial(save_checkpoint, subject)))


def refuse_unknown(subject: Subject, checks: Mapping[Enum, ActionCheck]) -> None:
    """Raise if the dispatch table has functions of the backend for actions that no check tests.

    Args:
        subject: The backend under test.
        checks: The caller's checks, by action.

    Raises:
        StrategyError: There are such functions; the error names their actions, with advice.
    """
    known: set[Enum] = {*OF_ACTIONS, *checks}
    unknown = [action for action in subject.actions() if action not in known]
    if unknown:
        heading = f"check_strategy: {(subject.backend, subject.version)!r} has functions for actions without a check"
        fix = (
            "Pass promises={action: check}. check(function, save) is called with the backend's function for the action "
            "and with a function that saves a list of trees, one for each rank, and returns the Checkpoint; check must "
            "raise AssertionError if the backend's function is wrong. Pass the action's signature, as a Protocol, in "
            "protocols={action: protocol}."
        )
        raise StrategyError(error_text(heading, offenders=list(map(str, unknown)), fix=fix))

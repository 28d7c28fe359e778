"""Our functions beside Megatron-Core's of the same names: how one is called there, the other can be called here."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest

import shardtree as st
from tests.docs.test_megatron_names import installed
from tests.peers.megatron_versions import CHANGED_ARGUMENTS

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("megatron.core.dist_checkpointing")

OTHERWISE = {
    "AsyncRequest": "there a function of one process and its arguments; here what is still to do on a world's ranks",
    "ShardedTensor.from_rank_offsets": "**init_kwargs are fields by name; here the one that is not an argument already",
}
"""Names whose parameters differ on purpose."""

NAMED, FREE = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
NONE_GIVEN = inspect.Parameter.empty


def called(owner: Any, name: str) -> Callable[..., Any] | None:
    """Return what a dotted name is there, if it is a function, or a class that says what it is made of."""
    for part in name.split("."):
        owner = getattr(owner, part, None)
    made = inspect.isclass(owner) and ({"_fields", "__dataclass_fields__", "__init__"} & vars(owner).keys())
    return owner if made or inspect.isroutine(owner) else None


def pairs() -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Return name -> theirs and ours, for each row of docs/megatron.md where both are called the same."""
    found = {}
    for module, rows in installed().items():
        for name in (theirs for theirs, cell in rows if cell == f"`{theirs}`"):
            theirs = called(importlib.import_module(f"megatron.core.dist_checkpointing.{module}"), name)
            ours = called(st, name)
            if theirs is not None and ours is not None:
                found[name] = (theirs, ours)
    return found


def misfits(theirs: Callable[..., Any], ours: Callable[..., Any]) -> list[str]:
    """Return what is wrong with our parameters for one who knows theirs."""
    known, own = (
        {name: p for name, p in inspect.signature(function).parameters.items() if name not in CHANGED_ARGUMENTS}
        for function in (theirs, ours)
    )
    first, placed = ([p.name for p in each.values() if p.kind in (NAMED, FREE)] for each in (known, own))
    wrong = [f"places: {placed}, theirs are {first}"] if placed != first else []
    wrong += [f"{name!r} is missing" for name in known if name not in own]
    needed = {name for name, p in known.items() if p.default is NONE_GIVEN}
    asked = [name for name, p in own.items() if p.default is NONE_GIVEN and p.kind is not FREE]
    wrong += [f"{name!r} must be given" for name in asked if name not in needed]
    return wrong


PAIRS = pairs()


@pytest.mark.parametrize("name", sorted(PAIRS.keys() - OTHERWISE.keys()))
def test_parameters_have_megatron_core_s_names_in_its_order(name: str) -> None:
    assert misfits(*PAIRS[name]) == []


def test_what_is_left_out_differs_indeed() -> None:
    assert [name for name in OTHERWISE if not misfits(*PAIRS[name])] == []


def test_the_comparison_is_of_many() -> None:
    assert {"save", "load", "merge", "diff", "apply_factory_merges", "ShardedTensor.narrow"} <= PAIRS.keys()
    assert len(PAIRS) > 40


@pytest.mark.parametrize(
    "planted",
    [
        lambda x2, x1, key=(): None,
        lambda x1, x2, key: None,
        lambda x1, x2, key=(), *, more: None,
    ],
    ids=["another order", "no default", "one more to give"],
)
def test_the_comparison_catches(planted: Callable[..., Any]) -> None:
    assert misfits(PAIRS["apply_factory_merges"][0], planted) != []

"""What ranks say of their shards is their columns, whatever the layout; what they have in common is sent once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import IntegrityError
from shardtree.inspection._explanation import check_alike
from shardtree.layouts import ShardColumns
from shardtree.shell.checkpoint import _packed
from shardtree.shell.checkpoint._consistency import describe
from shardtree.shell.checkpoint._packed import (
    AlikeColumns,
    pack_columns,
    send_tables,
    unpack_columns,
    without_long_table,
)
from shardtree.shell.table import Exchange
from shardtree.testing import GlobalState, global_states, rank_tree, state_layouts
from shardtree.world import simulate
from tests.core.trees.samples import assert_caught
from tests.shell.checkpoint.parts import saved_by

Layouts = Mapping[str, Any]
Hear = Callable[[Sequence[ShardColumns], int], list[ShardColumns]]
ARRAYS = ("key", "offset", "shape", "start", "stop", "rank", "main")


def heard(columns: Sequence[ShardColumns], together: int) -> list[ShardColumns]:
    """Return what a rank hears from ranks that hold these shards."""
    packed = [pack_columns(each, rank) for rank, each in enumerate(columns)]
    said = [without_long_table(each, len(columns) if together else 2**40) for each in packed]
    everywhere = simulate(len(columns), lambda world: unpack_columns(send_tables(world, packed[world.rank], said)))
    return everywhere[-1]


def check_columns_are_heard(hear: Hear, state: GlobalState, layout: Layouts, together: int) -> None:
    ranks = next(iter(layout.values())).ranks
    trees = (rank_tree(state, layout, rank) for rank in range(ranks))
    own = [st.layouts.shard_columns(st.core.layouts.tensor_shards(tree), rank) for rank, tree in enumerate(trees)]
    for found, expected in zip(hear(own, together), own, strict=True):
        assert (found.keys, found.kinds) == (expected.keys, expected.kinds)
        for name in ARRAYS:
            left, right = getattr(found, name), getattr(expected, name)
            assert left.dtype == right.dtype and np.array_equal(left, right), name


@some.composite
def cases(draw: some.DrawFn) -> tuple[GlobalState, Layouts, int]:
    state = draw(global_states().filter(lambda state: bool(state.tensors)))
    return state, draw(state_layouts(state, draw(some.integers(1, 4)))), draw(some.integers(0, 1))


@settings(deadline=None)
@given(cases())
def test_columns_are_heard_as_they_are(case: tuple[GlobalState, Layouts, int]) -> None:
    check_columns_are_heard(heard, *case)


def kept_once(columns: Sequence[ShardColumns], together: int) -> list[ShardColumns]:
    """Return the columns of several ranks, once those that are alike are kept once."""
    said = AlikeColumns()
    for rank, each in enumerate(columns):
        said.add(each, rank)
    return said.select(lambda part: np.arange(len(part)))


@settings(deadline=None)
@given(cases())
def test_columns_that_are_kept_once_are_those_of_every_rank(case: tuple[GlobalState, Layouts, int]) -> None:
    check_columns_are_heard(kept_once, *case)


def check_said_alike(check: Callable[..., None], case: tuple[GlobalState, Layouts, int], mask: Sequence[bool]) -> None:
    """Raise unless columns that are kept once fail as all ranks' do, whichever rows are main replicas."""
    state, layout, _ = case
    trees = (rank_tree(state, layout, rank) for rank in range(next(iter(layout.values())).ranks))
    parts = [st.layouts.shard_columns(st.core.layouts.tensor_shards(tree), rank) for rank, tree in enumerate(trees)]
    parts = [replace(part, main=part.main & np.resize(np.array(mask), len(part))) for part in parts]
    said, descriptions = AlikeColumns(), [describe((), (), rank, ranks=len(parts)) for rank in range(len(parts))]
    for rank, part in enumerate(parts):
        said.add(part, rank)
    expected = error_of(lambda: st.core.layouts.join_checked(parts))
    assert error_of(lambda: check(said, descriptions)) == expected


def error_of(work: Callable[[], object]) -> str:
    try:
        work()
    except IntegrityError as error:
        return str(error)
    return ""


MASKS = some.lists(some.booleans(), min_size=1, max_size=5)


@settings(deadline=None)
@given(cases(), MASKS)
def test_what_is_wrong_is_said_alike_of_columns_that_are_kept_once(
    case: tuple[GlobalState, Layouts, int], mask: Sequence[bool]
) -> None:
    check_said_alike(check_alike, case, mask)


def test_the_law_catches_replicas_that_are_forgotten() -> None:
    def main_alone(said: AlikeColumns, descriptions: Any) -> None:
        st.core.layouts.join_checked(said.select(lambda part: np.flatnonzero(part.main)))

    assert_caught(check_said_alike, main_alone, cases(), MASKS)


def with_the_first_places(columns: Sequence[ShardColumns], together: int) -> list[ShardColumns]:
    """The planted fault: ranks with equal tables are taken to lie in the same places, too."""
    packed = [pack_columns(each, rank) for rank, each in enumerate(columns)]
    first = {part.digest: part.places for part in reversed(packed)}
    return unpack_columns([replace(part, places=first[part.digest]) for part in packed])


def test_the_law_catches() -> None:
    assert_caught(lambda hear, case: check_columns_are_heard(hear, *case), with_the_first_places, cases())


def tree(rank: int) -> dict[str, Any]:
    return {"a": st.ShardedTensor.from_rank_offsets("a", torch.full((3,), rank), (0, rank, 2))}


@pytest.mark.parametrize("exchange", ["never", "always"])
def test_many_ranks_save_and_load_what_few_do(monkeypatch: pytest.MonkeyPatch, exchange: Exchange) -> None:
    monkeypatch.setattr(_packed, "_TOGETHER", 0)
    folder, options = saved_by([tree(rank) for rank in range(2)]), st.LoadOptions(exchange=exchange)
    empty = simulate(2, lambda world: st.load(tree(1 - world.rank), folder, world=world, options=options))
    assert [each["a"].tolist() for each in empty] == [[1, 1, 1], [0, 0, 0]]

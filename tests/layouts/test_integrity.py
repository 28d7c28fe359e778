"""Whether main replicas tile their tensors, compared with counting the replicas of every element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.errors import IntegrityError
from shardtree.layouts import (
    Problem,
    ShardColumns,
    access_problems,
    check_access,
    first_gap,
    join_columns,
    shard_columns,
)
from shardtree.mapping import ShardedTensor, is_main_replica
from shardtree.testing import Layout, Piece, cut, layouts, shapes
from tests.trees.samples import assert_caught

SHAPES = shapes(max_axes=3, sizes=(1, 2, 3, 4, 0))
LAYOUTS = st.tuples(SHAPES, st.integers(1, 4)).flatmap(lambda args: layouts(*args))
Check = Callable[[ShardColumns], tuple[Problem, ...]]


def columns_of(layout: Layout) -> ShardColumns:
    whole = torch.zeros(layout.global_shape, dtype=torch.int8)
    return join_columns([shard_columns(cut(layout, "w", whole, rank), rank) for rank in range(layout.ranks)])


def replicas(layout: Layout) -> np.ndarray:
    """Return how many main replicas each element has, by filling in piece after piece."""
    count = np.zeros(layout.global_shape, dtype=np.int64)
    for piece in layout.pieces:
        if is_main_replica(piece.replica):
            box = tuple(slice(low, low + size) for low, size in zip(piece.offset, piece.shape, strict=True))
            ones = np.ones(prod(piece.shape), dtype=np.int64)
            if piece.flat is not None:
                ones[: piece.flat[0]] = ones[piece.flat[1] :] = 0
            count[box] += ones.reshape(piece.shape)
    return count


@st.composite
def damaged(draw: st.DrawFn) -> Layout:
    """Return a layout of which pieces were lost, doubled or demoted, or none of it."""
    layout = draw(LAYOUTS)
    pieces = []
    for piece in layout.pieces:
        fate = draw(st.sampled_from(["keep", "keep", "keep", "lose", "double", "demote"]))
        demoted = replace(piece, replica=7)
        other = replace(piece, rank=(piece.rank + 1) % layout.ranks)
        pieces += {"keep": [piece], "lose": [], "double": [piece, other], "demote": [demoted]}[fate]
    return replace(layout, pieces=tuple(pieces))


def problems_are_real(check: Check, layout: Layout) -> None:
    count = replicas(layout)
    columns = columns_of(layout)
    problems = check(columns)
    if not columns.keys or (count == 1).all():
        assert problems == ()
    else:
        assert len(problems) == 1
        problem = problems[0]
        assert problem.key == "w"
        if (count > 1).any():
            assert "more than one main replica" in problem.what
        else:
            missing = np.argwhere(count == 0)
            first = tuple(missing[0].tolist())
            assert problem.what.startswith(f"{len(missing)} of {count.size} elements")
            assert problem.what.endswith(f"at {first}")


@given(LAYOUTS)
def test_a_sound_layout_has_no_problems(layout: Layout) -> None:
    assert (replicas(layout) == 1).all()
    assert access_problems(columns_of(layout)) == ()
    check_access(columns_of(layout))


@given(damaged())
def test_problems_are_what_counting_replicas_finds(layout: Layout) -> None:
    problems_are_real(access_problems, layout)


def test_problems_catch_a_check_that_only_adds_up_volumes() -> None:
    def by_volume(columns: ShardColumns) -> tuple[Problem, ...]:
        held = int(columns.elements[columns.main].sum())
        needed = prod(columns.kinds[0].global_shape) if columns.kinds else 0
        return () if held == needed else access_problems(columns)

    assert_caught(problems_are_real, by_volume, damaged())


@given(damaged())
def test_the_box_of_an_overlap_is_held_twice(layout: Layout) -> None:
    count = replicas(layout)
    for problem in access_problems(columns_of(layout)):
        if "more than one" in problem.what:
            spans = problem.what[1 : problem.what.index("]")]
            box = tuple(slice(*map(int, span.split(":"))) for span in spans.split(", ") if span)
            assert count[box].size
            assert (count[box] > 1).all()


Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]


@st.composite
def some_boxes(draw: st.DrawFn) -> tuple[Boxes, tuple[int, ...]]:
    """Return a few of the boxes that tile a shape with elements."""
    shape = draw(shapes(max_axes=3, sizes=(1, 2, 3, 4)))
    layout = draw(layouts(shape, 1))
    columns = columns_of(replace(layout, pieces=tuple(replace(piece, flat=None) for piece in layout.pieces)))
    rows = sorted(set(zip(map(tuple, columns.offset.tolist()), map(tuple, columns.shape.tolist()), strict=True)))
    return [row for row in rows if draw(st.integers(0, 3))], shape


def is_the_first_hole(find: Callable[..., tuple[int, ...]], case: tuple[Boxes, tuple[int, ...]]) -> None:
    boxes, shape = case
    axes = max(1, len(shape))
    covered = np.zeros(shape or (1,), dtype=np.bool_)
    for offset, size in boxes:
        covered[tuple(slice(low, low + length) for low, length in zip(offset, size, strict=True))] = True
    offsets, sizes = (np.array([box[side] for box in boxes], dtype=np.int64).reshape(-1, axes) for side in (0, 1))
    holes = np.argwhere(~covered)
    expected = tuple(holes[0].tolist())[: len(shape)] if len(holes) else shape
    assert find(offsets, sizes, shape) == expected


@given(some_boxes())
def test_the_first_gap_is_the_first_in_row_major_order(case: tuple[Boxes, tuple[int, ...]]) -> None:
    is_the_first_hole(first_gap, case)


def test_the_first_gap_catches_the_axes_taken_the_wrong_way_round() -> None:
    def last_axis_first(offset: np.ndarray, shape: np.ndarray, whole: tuple[int, ...]) -> tuple[int, ...]:
        if len(whole) < 2:
            return first_gap(offset, shape, whole)
        return first_gap(offset[:, ::-1], shape[:, ::-1], whole[::-1])[::-1]

    assert_caught(is_the_first_hole, last_axis_first, some_boxes())


def shard(offset: Sequence[int], shape: Sequence[int], whole: Sequence[int], **more: Any) -> ShardedTensor:
    return ShardedTensor("w", None, torch.int8, tuple(shape), tuple(whole), tuple(offset), None, **more)


def described(*shards: ShardedTensor) -> list[str]:
    columns = join_columns([shard_columns([held], rank) for rank, held in enumerate(shards)])
    return [str(problem) for problem in access_problems(columns)]


def test_an_overlap_names_both_ranks_and_the_box_they_share() -> None:
    assert described(shard((0, 0), (3, 2), (4, 2)), shard((2, 0), (2, 2), (4, 2))) == [
        "'w' (ranks 0, 1): [2:3, 0:2] is held by more than one main replica"
    ]


def test_a_tensor_without_any_main_replica_is_missing_from_its_first_element() -> None:
    assert described(shard((0, 0), (4, 2), (4, 2), replica_id=1)) == [
        "'w': 8 of 8 elements have no main replica; the first one missing is at (0, 0)"
    ]


def test_a_flat_range_that_stops_short_leaves_a_gap_inside_a_row() -> None:
    assert described(shard((0, 0), (2, 4), (2, 4), flattened_range=slice(0, 6))) == [
        "'w' (ranks 0): 2 of 8 elements have no main replica; the first one missing is at (1, 2)"
    ]


def test_a_scalar_is_one_element() -> None:
    assert described(shard((), (), ())) == []
    assert described(shard((), (), ()), shard((), (), ())) == [
        "'w' (ranks 0, 1): [] is held by more than one main replica"
    ]


def test_what_lies_beyond_the_tensor_does_not_make_up_for_a_gap() -> None:
    found = described(shard((0,), (2,), (4,)), shard((4,), (2,), (4,), allow_shape_mismatch=True))
    assert found == ["'w' (ranks 1): a shard reaches beyond the global shape (4,)"]


def test_every_tensor_that_is_wrong_is_named() -> None:
    shards = [ShardedTensor.from_rank_offsets(key, torch.zeros(2), (0, 0, 2)) for key in ("a", "b")]
    with pytest.raises(IntegrityError, match=r"(?s)'a' \(ranks 0\).*'b' \(ranks 0\).*replica_id"):
        check_access(shard_columns(shards))


def test_replicas_and_idle_ranks_are_no_problem() -> None:
    layout = Layout(3, (4,), (Piece(0, (0,), (4,)), Piece(2, (0,), (4,), replica=1)))
    assert access_problems(columns_of(layout)) == ()

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

from shardtree.core.geometry import volumes
from shardtree.core.layouts import (
    Faults,
    _integrity,
    access_problems,
    doubled_faults,
    join_checked,
    place_text,
    raise_problems,
    select_rows,
    sharding_faults,
)
from shardtree.core.layouts._problems import _sizes
from shardtree.errors import IntegrityError
from shardtree.layouts import Problem, ShardColumns, join_columns, shard_columns, sharding_problems
from shardtree.mapping import ShardedTensor, is_main_replica
from shardtree.testing import Layout, Piece, cut, layouts, shapes
from tests.core.trees.samples import assert_caught

SHAPES = shapes(max_axes=3, sizes=(1, 2, 3, 4, 0))
LAYOUTS = st.tuples(SHAPES, st.integers(1, 4)).flatmap(lambda args: layouts(*args))
Check = Callable[[ShardColumns], tuple[Problem, ...]]


def columns_of(layout: Layout) -> ShardColumns:
    whole = torch.zeros(layout.global_shape, dtype=torch.int8)
    layout = replace(layout, grid=None)  # moved pieces are in no regular grid
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
def shifted(draw: st.DrawFn, layout: Layout, piece: Piece) -> Piece:
    """Return a piece elsewhere in its tensor, or another range of the same length of its box."""
    ends = zip(layout.global_shape, piece.shape, strict=True)
    offset = tuple(draw(st.integers(0, size - length)) for size, length in ends)
    if piece.flat is None or draw(st.booleans()):
        return replace(piece, offset=offset)
    length = piece.flat[1] - piece.flat[0]
    start = draw(st.integers(0, prod(piece.shape) - length))
    return replace(piece, flat=(start, start + length))


@st.composite
def damaged(draw: st.DrawFn) -> Layout:
    """Return a layout of which pieces were lost, doubled or demoted, or none of it."""
    layout = draw(LAYOUTS)
    pieces = []
    for piece in layout.pieces:
        fate = draw(st.sampled_from(["keep", "keep", "keep", "lose", "double", "demote", "move"]))
        demoted = replace(piece, replica=7)
        other = replace(piece, rank=(piece.rank + 1) % layout.ranks)
        moved = draw(shifted(layout, piece)) if fate == "move" else piece
        pieces += {"lose": [], "double": [piece, other], "demote": [demoted]}.get(fate, [moved])
    return replace(layout, pieces=tuple(pieces))


Faulty = Callable[[ShardColumns], Faults]


def main_rows(columns: ShardColumns) -> ShardColumns:
    return select_rows(columns, np.flatnonzero(columns.main))


def add_to(count: np.ndarray, box: tuple[slice, ...], flat: slice | None) -> None:
    """Count a box, or a flat range of it, once more."""
    place = count[(*box, ...)]
    ones = np.ones(place.size, dtype=np.int64)
    if flat is not None:
        ones[: flat.start] = ones[flat.stop :] = 0
    place += ones.reshape(place.shape)


def faults_are_what_counting_finds(find: Faulty, layout: Layout) -> None:
    """Each element that isn't held once is in one fault of its kind, and no other element is in any."""
    columns = columns_of(layout)
    faults = find(main_rows(columns))
    axes = len(layout.global_shape)
    for doubled in (False, True):
        told = np.zeros(layout.global_shape, dtype=np.int64)
        for row in np.flatnonzero(faults.doubled == doubled):
            spans = list(zip(faults.offset[row].tolist(), faults.shape[row].tolist(), strict=True))
            box = tuple(slice(low, low + size) for low, size in spans[len(spans) - axes :])
            start, stop = int(faults.start[row]), int(faults.stop[row])
            add_to(told, box, None if start < 0 else slice(start, stop))
        count = replicas(layout)
        wrong = (count > 1 if doubled else count == 0) & bool(columns.keys)
        assert (told == wrong).all()


@given(damaged())
def test_faults_are_what_counting_replicas_finds(layout: Layout) -> None:
    faults_are_what_counting_finds(sharding_faults, layout)


@given(damaged())
def test_doubled_faults_are_those_that_are_held_twice(layout: Layout) -> None:
    every, doubled = sharding_faults(main_rows(columns_of(layout))), doubled_faults(main_rows(columns_of(layout)))
    rows = np.flatnonzero(every.doubled)
    assert doubled.doubled.all()
    for name in ("offset", "shape", "start", "stop"):
        assert sorted(getattr(every, name)[rows].tolist()) == sorted(getattr(doubled, name).tolist())


def by_volume(main: ShardColumns) -> Faults:
    held = int(main.elements.sum())
    needed = prod(main.kinds[0].global_shape) if main.kinds else 0
    return sharding_faults(main if held != needed else select_rows(main, np.arange(0)))


def without_flat_offsets(main: ShardColumns) -> Faults:
    """Take a flat range for one of the same length that begins at 0."""
    return sharding_faults(
        replace(main, stop=np.where(main.start < 0, -1, main.stop - main.start), start=np.minimum(main.start, 0))
    )


@pytest.mark.slow
@pytest.mark.parametrize("broken", [by_volume, without_flat_offsets])
def test_the_law_catches(broken: Faulty) -> None:
    assert_caught(faults_are_what_counting_finds, broken, damaged())


def problems_tell_all_faults(check: Check, layout: Layout) -> None:
    """Their boxes are the faults, and their words say the boxes, and all ranks that hold something there."""
    problems = check(columns_of(layout))
    count = replicas(layout)
    told = np.zeros((2, *count.shape), dtype=np.int64)
    for problem in problems:
        if problem.box is None:
            return  # there are more than are shown
        doubled = "more than one main replica" in problem.what
        add_to(told[int(doubled), ...], problem.box, problem.flat)
        assert problem.what.startswith(place_text(problem.box, problem.flat))
        if doubled:
            assert set(problem.ranks) == ranks_in(layout, problem)
    if columns_of(layout).keys:
        assert (told[0] == (count == 0)).all()
        assert (told[1] == (count > 1)).all()


def ranks_in(layout: Layout, problem: Problem) -> set[int]:
    """Return whose main replicas have an element in a problem's place."""
    found = set()
    for piece in layout.pieces:
        both = np.zeros(layout.global_shape, dtype=np.int64)
        add_to(both, problem.box or (), problem.flat)
        box = tuple(slice(low, low + size) for low, size in zip(piece.offset, piece.shape, strict=True))
        add_to(both, box, None if piece.flat is None else slice(*piece.flat))
        found |= {piece.rank} if is_main_replica(piece.replica) and (both > 1).any() else set()
    return found


@given(damaged())
def test_problems_name_every_fault_and_its_ranks(layout: Layout) -> None:
    problems_tell_all_faults(access_problems, layout)


def test_the_law_of_problems_catches_one_that_is_left_out() -> None:
    assert_caught(problems_tell_all_faults, lambda columns: access_problems(columns)[1:], damaged())


def check_few_at_a_time(problems: Check, tensors: list[Layout], most_rows: int) -> None:
    """Raise unless tensors have the problems that each has alone, however few are checked at a time."""
    parts = [replace(columns_of(layout), keys=(f"w{number}",)) for number, layout in enumerate(tensors)]
    expected = [problem for part in parts for problem in access_problems(part)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_integrity, "_MOST_ROWS", most_rows)
        found = problems(join_columns(parts))
    assert sorted(map(str, found)) == sorted(map(str, expected))


TENSORS = st.lists(damaged().filter(lambda layout: bool(layout.pieces)), max_size=4)


@given(TENSORS, st.integers(0, 9))
def test_tensors_are_checked_few_at_a_time(tensors: list[Layout], most_rows: int) -> None:
    check_few_at_a_time(access_problems, tensors, most_rows)


@pytest.mark.slow
def test_the_law_of_problems_catches_one_pair_of_ranks_for_all() -> None:
    def first_pair(columns: ShardColumns) -> tuple[Problem, ...]:
        return tuple(replace(problem, ranks=problem.ranks[:2]) for problem in access_problems(columns))

    assert_caught(problems_tell_all_faults, first_pair, damaged())


def shard(offset: Sequence[int], shape: Sequence[int], whole: Sequence[int], **more: Any) -> ShardedTensor:
    return ShardedTensor("w", None, torch.int8, tuple(shape), tuple(whole), tuple(offset), None, **more)


def raised(check: Callable[[], object]) -> str:
    try:
        check()
    except IntegrityError as error:
        return str(error)
    return ""


@given(LAYOUTS)
def test_what_is_joined_and_checked_is_what_either_gives(layout: Layout) -> None:
    whole = torch.zeros(layout.global_shape, dtype=torch.int8)
    layout = replace(layout, grid=None)
    parts = [shard_columns(cut(layout, "w", whole, rank), rank) for rank in range(layout.ranks)]
    problems = sharding_problems(parts)
    assert raised(lambda: join_checked(parts)) == raised(lambda: raise_problems(problems))
    if not problems:
        joined, expected = join_checked(parts), join_columns(parts)
        assert joined.keys == expected.keys and joined.rank.tolist() == expected.rank.tolist()
        assert joined.offset.tolist() == expected.offset.tolist()


HUGE = st.lists(st.integers(0, 2**40), min_size=2, max_size=2)
Sizes = Callable[[np.ndarray], np.ndarray]


def counts(sizes_of: Sizes, shapes: list[list[int]]) -> bool:
    sizes = sizes_of(np.array(shapes, dtype=np.int64).reshape(-1, 2))
    return sizes.tolist() == [min(prod(shape), 2**63 - 1) for shape in shapes]


@given(st.lists(HUGE, max_size=4))
def test_a_region_of_any_size_is_counted(shapes: list[list[int]]) -> None:
    assert counts(_sizes, shapes)


def test_the_law_catches_sizes_that_begin_again_at_zero() -> None:
    assert not counts(volumes, [[2**40, 2**40]])


def test_huge_irregular_layouts_are_searched_where_they_are_wrong() -> None:
    """A grid between all edges would have 16 million cells."""
    places = np.arange(4000)
    columns = shard_columns([shard((0, 0), (1, 1), (4000, 4000))])
    count = len(places)
    staircase = replace(
        columns,
        key=np.zeros(count, dtype=np.int64),
        offset=np.column_stack([places, places * 0]),
        shape=np.column_stack([places * 0 + 1, 4000 - (places == 7)]),
        **{name: np.repeat(getattr(columns, name), count) for name in ("start", "stop", "rank", "main")},
    )
    (problem,) = access_problems(staircase)
    assert problem.box == (slice(7, 8), slice(3999, 4000))

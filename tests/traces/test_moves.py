"""Moves against plain arrays: what writes leave, what reads find, what is covered."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as draw

from shardtree.traces import _moves
from shardtree.traces._differences import same
from shardtree.traces._moves import Move, Moves, Written, normal, rolled
from shardtree.traces._problems import coverage
from shardtree.traces._steps import Constant
from tests.traces.programs import all_places, places, random_view

seeds = draw.integers(0, 2**32)


def written(random: Random) -> tuple[Written, np.ndarray]:
    """Return random writes to flat elements, and the array that plain writes leave; -1 where nothing is written."""
    numel, value = random.randint(5, 80), 0
    array, cell = np.full(numel, -1), Written()
    for _ in range(random.randint(1, 6)):
        start, loops = random_view(random, numel)
        order, steps, below = random.sample(range(len(loops)), len(loops)), [0] * len(loops), 1
        for which in order:
            steps[which], below = below, below * loops[which][0]
        move = normal(Move("s", start, value, tuple((n, to, at) for (n, to), at in zip(loops, steps, strict=True))))
        cell.take(move)
        cell.add(move)
        array[places(move, 0)] = places(move, 1)
        value += below
    return cell, array


def elements(moves: Moves, numel: int) -> np.ndarray:
    found = np.full(numel, -1)
    for move in moves:
        where = places(move, 0)
        assert (found[where] == -1).all(), "a place is written twice"
        found[where] = places(move, 1)
    return found


@given(seeds)
def test_what_is_written_last_is_there(seed: int) -> None:
    cell, array = written(Random(seed))
    assert (elements(cell, len(array)) == array).all()
    again = Moves(rolled(cell))
    assert (elements(again, len(array)) == array).all()
    assert same(cell, again)
    assert same(again, cell)


@given(seeds)
def test_a_read_finds_what_was_written_and_what_was_not(seed: int) -> None:
    random = Random(seed)
    cell, array = written(random)
    check_read(random, cell, array)


def check_read(random: Random, cell: Moves, array: np.ndarray) -> None:
    start, loops = random_view(random, len(array))
    loops += [(random.randint(1, 3), 0)] if random.random() < 0.3 else []
    random.shuffle(loops)
    below, dense = 1, list[int]()
    for count, _ in reversed(loops):
        dense.insert(0, below)
        below *= count
    read = Move(None, 0, start, tuple((n, to, at) for (n, at), to in zip(loops, dense, strict=True)))
    want, got = array[places(read, 1)], np.full(below, -2)
    found, missing = cell.find([read])
    for move in (*found, *missing):
        assert (got[places(move, 0)] == -2).all(), "an element is found twice"
        got[places(move, 0)] = places(move, 1) if move.root else -1
    assert (got == want).all()


def nested_loops(random: Random) -> list[tuple[int, int]]:
    """Return loops (count, step) with gaps of any width between them, outermost first."""
    below, loops = 1, list[tuple[int, int]]()
    for _ in range(random.randint(1, 4)):
        step, count = below + random.choice([0, 0, 1, 2, 3, 5]), random.randint(2, 4)
        loops.append((count, step))
        below = step * count + random.choice([0, 0, 1, 4])
    return loops[::-1]


@pytest.fixture
def _that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that is cut into itself for ever gets one more loop each time."""
    meet = _moves._meet

    def checked(read: Move, *args: Any) -> Any:
        assert len(read.loops) < 64
        return meet(read, *args)

    monkeypatch.setattr(_moves, "_meet", checked)


@pytest.mark.usefixtures("_that_ends")
@given(seeds)
def test_a_read_by_any_steps_ends(seed: int) -> None:
    random = Random(seed)
    write = Move("s", random.randint(0, 20), 0, tuple((n, to, random.randint(0, 50)) for n, to in nested_loops(random)))
    loops, below, dense = [(random.randint(1, 5), random.randint(0, 40)) for _ in range(3)], 1, list[int]()
    for count, _ in reversed(loops):
        dense.insert(0, below)
        below *= count
    read = Move(None, 0, random.randint(0, 30), tuple((n, to, at) for (n, at), to in zip(loops, dense, strict=True)))
    array = np.full(max(write.end, read.last) + 1, -1)
    array[places(write, 0)] = places(write, 1)
    found, missing = Moves([write]).find([read])
    got = np.full(below, -2)
    for move in (*found, *missing):
        got[places(move, 0)] = places(move, 1) if move.root else -1
    assert (got == array[places(read, 1)]).all()


def test_the_law_of_reads_catches_a_step_that_carries() -> None:
    """The planted fault: a read that goes over the end of a row is taken for one along it."""

    class Careless(Moves):
        def find(self, reads):  # type: ignore[no-untyped-def]
            found, missing = super().find(reads)
            return [normal(move._replace(loops=move.loops[:1])) for move in found], missing

    def check() -> None:
        for seed in range(50):
            cell, array = written(Random(seed))
            check_read(Random(seed), Careless(cell), array)

    with pytest.raises(AssertionError):
        check()


@given(seeds)
def test_coverage_is_what_counting_finds(seed: int) -> None:
    check_coverage(seed, coverage)


def check_coverage(seed: int, of) -> None:  # type: ignore[no-untyped-def]
    random, numel = Random(seed), 60
    moves = []
    for _ in range(random.randint(1, 5)):
        start, loops = random_view(random, numel)
        loops += [(random.randint(2, 3), 0)] if random.random() < 0.2 else []
        if random.random() < 0.3:  # steps that interleave, or meet: as those of a gather
            start, loops = random.randrange(10), [(random.randint(1, 4), random.randint(1, 5)) for _ in range(3)]
        random.shuffle(loops)
        moves.append(Move("s", start, 0, tuple((count, step, 1) for count, step in loops)))
    counts = np.bincount(np.concatenate([places(move, 0) for move in moves]), minlength=numel)
    left, twice = of(moves, numel)
    assert all_places(left, 0) == np.flatnonzero(counts == 0).tolist()
    assert set(all_places(twice, 0)) == set(np.flatnonzero(counts > 1).tolist())


def test_the_law_of_coverage_catches_loops_that_stay_where_they_are() -> None:
    def careless(moves, numel):  # type: ignore[no-untyped-def]
        moving = [move._replace(loops=tuple(loop for loop in move.loops if loop[1])) for move in moves]
        return coverage(moving, numel)

    def check() -> None:
        for seed in range(50):
            check_coverage(seed, careless)

    with pytest.raises(AssertionError):
        check()


@given(seeds)
def test_moves_are_the_same_if_their_elements_are(seed: int) -> None:
    random = Random(seed)
    cell, array = written(random)
    which = random.randrange(len(cell))
    changed = cell[which]._replace(at=cell[which].at + random.randint(0, 1) * 1000)
    others = Moves([*cell[:which], changed, *cell[which + 1 :]])
    assert same(cell, others) == (changed == cell[which]) == same(others, cell)
    fewer = Moves([*cell[:which], *cell[which + 1 :]])
    assert not same(cell, fewer)
    assert not same(fewer, cell)
    single = Moves(normal(Move("s", place, int(array[place]), ())) for place in range(len(array)) if array[place] >= 0)
    assert same(cell, single)
    assert same(single, cell)


def test_constants_of_one_element_are_equal_with_any_stride() -> None:
    one, other = torch.tensor([2.0]), torch.tensor([2.0, 3.0, 4.0])[::2][:1]
    assert Constant(one) == Constant(other)
    assert Constant(one) != Constant(-other)

"""What moves between ranks: long pieces are messages of their own, so that they go from and to where they lie."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as draws

from shardtree.live import long_pieces_apart
from shardtree.plans import Schedule

LONG = 64
PIECES = draws.lists(
    draws.tuples(
        draws.integers(0, 3), draws.integers(0, 2), draws.integers(0, 2), draws.sampled_from([8, LONG, 2 * LONG])
    ),
    max_size=12,
)


def schedule_of(pieces: list[tuple[int, int, int, int]]) -> Schedule:
    step, first, second, nbytes = np.array(sorted(pieces), dtype=np.int64).reshape(-1, 4).T
    number = np.arange(step.size)
    return Schedule(step, number, number * 0, nbytes, first, second, nbytes, 64 * LONG)


@given(PIECES)
def test_a_long_piece_is_alone_and_all_move_in_their_order(pieces: list[tuple[int, int, int, int]]) -> None:
    before = schedule_of(pieces)
    after = long_pieces_apart(before, LONG)
    assert (np.diff(after.step) >= 0).all()
    assert sorted(after.transfer.tolist()) == before.transfer.tolist()
    # Steps stay in their order: what is passed on has come before it goes.
    assert (np.diff(before.step[after.transfer]) >= 0).all()
    for name in ("start", "stop", "from_rank", "to_rank", "nbytes"):
        assert (getattr(after, name) == getattr(before, name)[after.transfer]).all()
    places = list(zip(after.step.tolist(), after.from_rank.tolist(), after.to_rank.tolist(), strict=True))
    for place, nbytes in zip(places, after.nbytes.tolist(), strict=True):
        assert nbytes < LONG or places.count(place) == 1

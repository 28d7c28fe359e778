"""The picture of a layout, as plain text."""

from __future__ import annotations

import pytest
import torch

import shardtree as st
from shardtree.cli._picture import Picture, blank, draw, filled

SPECS = {0: st.P("tp"), 1: st.P(None, "tp"), None: st.P()}


def shards(axis: int | None, count: int, *, rows: int = 10) -> list[st.ShardedTensor]:
    return [tree["w"] for tree in st.shard({"w": torch.empty(rows, 8)}, st.Mesh(tp=count), SPECS[axis])]


def picture(axis: int | None, count: int, *, rows: int = 10) -> Picture:
    return draw(shards(axis, count, rows=rows), width=20, height=6)


def test_uneven_rows() -> None:
    assert filled(picture(0, 4)) == (
        "000000 rank 0 000000",
        "00000000000000000000",
        "111111 rank 1 111111",
        "11111111111111111111",
        "222222 rank 2 222222",
        "333333 rank 3 333333",
    )


def test_columns() -> None:
    assert filled(picture(1, 2))[1:4] == ("00000000001111111111", "0 rank 0 01 rank 1 1", "00000000001111111111")


def test_names_shrink_and_vanish_where_there_is_no_room() -> None:
    assert filled(picture(1, 4))[2] == "0 0 01 1 12 2 23 3 3"
    assert filled(draw(shards(1, 8), width=16, height=1)) == ("0011223344556677",)


def test_only_the_first_of_replicas_is_seen() -> None:
    assert set("".join(filled(picture(None, 3)))) == set("0 rank")


def test_empty_pieces_are_left_out() -> None:
    assert {rank for line in picture(0, 4, rows=2).owner for rank in line} == {0, 1}


def test_on_colour_only_the_names_are_written() -> None:
    assert blank(picture(0, 1)) == (*[" " * 20] * 2, "       rank 0       ", *[" " * 20] * 3)


@pytest.mark.parametrize("axis", [0, 1])
def test_every_cell_has_an_owner_when_the_shards_tile(axis: int) -> None:
    assert all(rank is not None for count in range(1, 20) for line in picture(axis, count).owner for rank in line)


def test_a_gap_is_seen() -> None:
    seen = draw(shards(0, 4)[1:], width=20, height=6)
    assert seen.owner[0][0] is None
    assert filled(seen)[0] == " " * 20

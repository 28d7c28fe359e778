"""The tensor-parallel layouts: every weight has a rule, and the pieces tile it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hst

from shardtree.cli._encoder import EncoderShape, weight_shapes
from shardtree.cli._layout import BY_HIDDEN, BY_UNITS, Layout, Rule, cuts, piece, rule_for
from shardtree.errors import KeyMismatch
from shardtree.layouts import check_access, join_columns, shard_columns

NAMES = [*weight_shapes(EncoderShape()), "embeddings.position_ids"]
LAYOUTS = {"units": BY_UNITS, "hidden": BY_HIDDEN}


def check_cuts(places: tuple[tuple[int, int], ...], size: int, count: int, unit: int) -> None:
    assert len(places) == count
    assert [index for start, stop in places for index in range(start, stop)] == list(range(size))
    lengths = [stop - start for start, stop in places]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= unit
    assert all(start % unit == 0 for start, _ in places)


@given(units=hst.integers(0, 40), count=hst.integers(1, 20), unit=hst.integers(1, 5))
def test_cuts_tile_an_axis_in_whole_units(units: int, count: int, unit: int) -> None:
    check_cuts(cuts(units * unit, count, unit), units * unit, count, unit)


@pytest.mark.parametrize("wrong", [((0, 3), (3, 7)), ((0, 2), (4, 8)), ((0, 8),), ((0, 5), (4, 8))])
def test_cuts_that_tile_nothing_are_found(wrong: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(AssertionError):
        check_cuts(wrong, 8, 2, 2)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_weight_has_a_rule_and_every_rule_a_weight(layout: Layout) -> None:
    assert {rule_for(layout, name) for name in NAMES} == set(layout)


def test_a_weight_without_a_rule_is_an_error() -> None:
    with pytest.raises(KeyMismatch, match=r"no rule for 'decoder\.weight'"):
        rule_for(BY_UNITS, "decoder.weight")


def test_every_matrix_is_cut_along_its_other_axis() -> None:
    matrices = [name for name, shape in weight_shapes(EncoderShape()).items() if len(shape) == 2]
    both = [(rule_for(BY_UNITS, name).axis, rule_for(BY_HIDDEN, name).axis) for name in matrices]
    assert set(both) == {(0, 1), (1, 0), (None, 1)}


@given(count=hst.integers(1, 14), layout=hst.sampled_from(list(LAYOUTS.values())), name=hst.sampled_from(NAMES))
def test_pieces_tile_their_weight(count: int, layout: Layout, name: str) -> None:
    shape = weight_shapes(EncoderShape()).get(name, (1, 512))
    whole, rule = torch.empty(shape, device="meta"), rule_for(layout, name)
    pieces = [piece(name, whole, rule, rank, count, head_size=32) for rank in range(count)]
    check_access(join_columns([shard_columns([shard], rank) for rank, shard in enumerate(pieces)]))


def test_heads_stay_whole() -> None:
    name = "encoder.layer.0.attention.self.query.weight"
    shards = [piece(name, torch.empty(384, 384), rule_for(BY_UNITS, name), rank, 5, head_size=32) for rank in range(5)]
    assert [shard.local_shape for shard in shards] == [(96, 384), (96, 384), (64, 384), (64, 384), (64, 384)]
    assert not shards[0].has_regular_grid


def test_a_piece_is_a_view_at_its_place() -> None:
    whole = torch.arange(30).reshape(10, 3)
    shard = piece("w", whole, Rule("w", 0), 1, 4)
    assert shard.data.data_ptr() == whole[3:].data_ptr()
    assert torch.equal(whole[shard.global_slice()], shard.data)

"""Rules for states of other shapes: what they make, that it comes back in other layouts, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import ShapeError, TreeError
from shardtree.testing import (
    Layout,
    assemble,
    check_held_once,
    check_pure,
    cut,
    irregular_layouts,
    layouts,
    regular_layouts,
    shapes,
)

GROUPS = [{"params": [0]}]


def rank_trees(
    layout: Layout, whole: torch.Tensor, state: Callable[[st.ShardedTensor], Any], rules: Any, key: str = "k"
) -> list[Any]:
    """What each shard of a layout makes of its state, as if each were on a rank of its own."""
    shards = [shard for rank in range(layout.ranks) for shard in cut(layout, "w", whole, rank)]
    return [
        st.optim.optim_state_to_sharding_state(
            {"state": {0: {key: state(shard)}}, "param_groups": GROUPS}, {0: shard}, rules=rules
        )
        for shard in shards
    ]


def local_part(whole: torch.Tensor, shard: st.ShardedTensor) -> torch.Tensor:
    """What a shard has of a global tensor with as many axes, some of size 1."""
    for axis, (size, offset, length) in enumerate(
        zip(shard.local_shape, shard.global_offset[shard.prepend_axis_num :], whole.shape, strict=True)
    ):
        whole = whole if length == 1 else whole.narrow(axis, offset, size)
    return whole


# -- reduced axes


@pytest.mark.slow
@given(some.data())
@pytest.mark.parametrize("keep", [True, False])
def test_what_all_pieces_have_of_an_axis_is_stored_once(keep: bool, data: some.DataObject) -> None:
    shape = data.draw(shapes(sizes=(2, 3, 4)).filter(bool))
    axis = data.draw(some.integers(0, len(shape) - 1))
    layout = data.draw(regular_layouts(shape, 3) | irregular_layouts(shape, 3))
    reduced = torch.arange(float(torch.Size(shape).numel())).view(shape).sum(axis, keepdim=True)

    def state(shard: st.ShardedTensor) -> torch.Tensor:
        part = local_part(reduced, shard)
        return part if keep else part.squeeze(axis)

    trees = rank_trees(
        layout, torch.zeros(shape), state, {"k": st.optim.reduced_axis(axis - len(shape), where_cut="equal")}
    )
    check_held_once(trees)
    assert torch.equal(assemble(trees)["optimizer.state.k.w"], reduced if keep else reduced.squeeze(axis))


def test_reduced_axis_catches_what_each_reduced_on_its_own() -> None:
    """Told to be equal, and it isn't."""
    shards = [st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, rank, 2)) for rank in range(2)]
    rule = st.optim.reduced_axis(0, where_cut="equal")
    with pytest.raises(AssertionError, match=r"copies of 'optimizer\.state\.k\.w' differ"):
        assemble([{"k": rule(shard, "k", torch.full((1, 3), float(n)))} for n, shard in enumerate(shards)])


def test_each_piece_has_its_own_column() -> None:
    shards = [st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, rank, 4)) for rank in range(4)]
    rule = st.optim.reduced_axis(-2, where_cut="own")
    trees = [{"k": rule(shard, "col_var", torch.full((1, 3), float(n)))} for n, shard in enumerate(shards)]
    check_held_once(trees)
    assert assemble(trees)["optimizer.state.col_var.w"][:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_reduced_behind_prepended_axes() -> None:
    shard = st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 5), (1, 1, 2), prepend_axis_num=1)
    row = st.optim.reduced_axis(-1)(shard, "row_var", torch.zeros(2))
    assert (row.global_shape, row.global_offset, row.prepend_axis_num) == ((5, 4), (1, 2), 1)


# -- scales of blocks


@given(some.data())
def test_scales_of_aligned_ranges_are_those_of_the_whole(data: some.DataObject) -> None:
    shape = data.draw(shapes(max_axes=3, sizes=(2, 3, 4, 8)).filter(bool))
    block = data.draw(some.sampled_from([1, 2, 4]))
    layout = data.draw(layouts(shape, 3, prepended=0))
    numel = torch.Size(shape).numel()
    whole = torch.arange(float(numel)).view(shape)
    scales = torch.stack([part.max() for part in whole.reshape(-1).split(block)])

    def state(shard: st.ShardedTensor) -> torch.Tensor:
        parts = shard.data.reshape(-1).split(block) if shard.data.numel() else []
        return torch.stack([part.max() for part in parts]) if parts else torch.zeros(0)

    def aligned(shard: st.ShardedTensor) -> bool:
        numbers = shard.data.reshape(-1).tolist()
        follows = not numbers or numbers[-1] - numbers[0] + 1 == len(numbers)
        starts = not numbers or numbers[0] % block == 0
        return follows and starts and (len(numbers) % block == 0 or numbers[-1] + 1 == numel)

    shards = [shard for rank in range(layout.ranks) for shard in cut(layout, "w", whole, rank)]
    if all(map(aligned, shards)):
        trees = rank_trees(layout, whole, state, {"k": st.optim.block_scales(block)})
        check_held_once(trees)
        assert torch.equal(assemble(trees)["optimizer.state.k.w"], scales)
    else:
        with pytest.raises(TreeError, match="expected consecutive whole blocks of the whole parameter"):
            rank_trees(layout, whole, state, {"k": st.optim.block_scales(block)})


def test_scales_catch_an_offset_in_elements() -> None:
    shards = [st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 4), (0, rank, 2)) for rank in range(2)]
    scales = [st.optim.block_scales(4)(shard, "absmax", torch.full((2,), float(n))) for n, shard in enumerate(shards)]
    assert assemble([{"k": scale} for scale in scales])["optimizer.state.absmax.w"].tolist() == [0, 0, 1, 1]
    wrong = [st.optim.block_scales(2)(shard, "absmax", torch.zeros(4)) for shard in shards]
    assert wrong[1].global_offset != scales[1].global_offset


def test_a_parameter_without_elements_has_no_blocks() -> None:
    second = st.ShardedTensor.from_rank_offsets("w", torch.zeros(0, 2), (1, 1, 2))
    assert st.optim.block_scales(4)(second, "absmax", torch.zeros(0)).global_shape == (0,)


# -- one of each


@pytest.mark.slow
@given(some.data())
def test_one_per_parameter_is_held_once(data: some.DataObject) -> None:
    shape = data.draw(shapes(sizes=(2, 3, 4)))
    layout = data.draw(layouts(shape, 3))
    code = torch.arange(5.0)
    trees = rank_trees(layout, torch.zeros(shape), lambda shard: code, {"*": st.optim.one_per_parameter})
    check_held_once(trees)
    front = layout.global_shape[: layout.prepended]
    assert torch.equal(assemble(trees)["optimizer.state.k.w"], code.expand(*front, 5))


def test_one_per_shard_is_a_place_for_each_cell() -> None:
    shards = [
        st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, row, 2), (1, column, 3), replica_id=replica)
        for row in range(2)
        for column in range(3)
        for replica in range(2)
    ]
    for state in (torch.zeros(4), {"seed": 3}):
        trees = [{"k": check_pure(st.optim.one_per_shard, shard, "k", state)} for shard in shards]
        check_held_once(trees)
        assert trees[0]["k"].global_shape[:2] == (2, 3)


# -- which rule


def test_the_first_rule_that_fits_counts_even_for_a_tensor_of_the_parameters_shape() -> None:
    param = st.ShardedTensor.from_rank_offsets("a.w", torch.zeros(2, 3))
    told = []

    def rule(name: str) -> Callable[..., Any]:
        return lambda param, state_key, tensor: told.append((name, state_key)) or st.LocalNonpersistentObject(tensor)

    state = {"state": {0: {"m": torch.zeros(2, 3), "v": torch.zeros(2, 3), "u": 1}}, "param_groups": GROUPS}
    rules = {"m": rule("key"), "v.**.w": rule("param"), "v": rule("late")}
    tree = st.optim.optim_state_to_sharding_state(state, {0: param}, rules=rules)
    assert told == [("key", "m"), ("param", "v")]
    assert isinstance(tree["state"][0]["u"], st.ShardedObject)


def test_what_a_rule_raises_says_for_what() -> None:
    param = st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3))
    state = {"state": {0: {"row_var": torch.zeros(5)}}, "param_groups": GROUPS}
    with pytest.raises(ShapeError, match=r"'row_var' of 'w'\n  found \(5,\), expected \(2,\)") as caught:
        st.optim.optim_state_to_sharding_state(state, {0: param}, rules=st.optim.adafactor_rules())
    assert "at tree['state']['w']['row_var']" in caught.value.__notes__[0]

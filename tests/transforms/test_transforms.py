from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.testing import check_pure, random_bits
from shardtree.transforms import merge_tensors, partial_rename, split_tensor, stack_layers, unstack_layers
from tests.transforms.flat_trees import DTYPES, Tree, check_same, check_undone, flat, whole


@some.composite
def layered(draw: some.DrawFn) -> Tree:
    count, kinds = draw(some.integers(1, 4)), draw(some.integers(1, 3))
    tree = flat(whole("embedding", torch.arange(3)))
    for kind in range(kinds):
        shape, dtype = draw(some.lists(some.integers(0, 3), max_size=3).map(tuple)), draw(DTYPES)
        cut, of = draw(some.sampled_from([(0, 1), (0, 2), (1, 2)])) if shape else (0, 1)
        for number in range(count):
            data = random_bits(shape, dtype, seed=draw(some.integers(0, 99)))
            ranks = [(0, cut, of)] if of > 1 else []
            shard = st.ShardedTensor.from_rank_offsets(f"model.layers.{number}.sub.w{kind}", data, *ranks)
            tree |= flat(replace(shard, axis_fragmentations=None) if kind == 1 else shard)
    return tree


@given(layered())
def test_unstack_undoes_stack(tree: Tree) -> None:
    check_undone(st.bind(stack_layers, "model.layers"), st.bind(unstack_layers, "model.layers"), tree)


@given(layered())
def test_stack_undoes_unstack(tree: Tree) -> None:
    stacked = stack_layers(tree, "model.layers")
    check_undone(st.bind(unstack_layers, "model.layers"), st.bind(stack_layers, "model.layers"), stacked)


def test_the_stack_law_catches_layers_in_another_order() -> None:
    def by_text(tree: Tree, prefix: str) -> Tree:
        stacked = stack_layers(tree, prefix)
        order = sorted(range(11), key=str)  # 0, 1, 10, 2, ...
        return st.map_shards(lambda leaf: replace(leaf, data=torch.stack([leaf.data[i] for i in order])), stacked)

    tree = flat(*(whole(f"h.{number}.w", torch.full((2,), number)) for number in range(11)))
    check_same(unstack_layers(stack_layers(tree, "h"), "h"), tree)
    with pytest.raises(AssertionError, match=r"h\.2\.w"):
        check_same(unstack_layers(by_text(tree, "h"), "h"), tree)


@pytest.mark.parametrize("dtype", ["bits16", "uint64", "float8_e8m0fnu", "complex64"])
def test_tensors_of_dtypes_that_torch_cannot_join_are_joined_bit_for_bit(dtype: str) -> None:
    data = [random_bits((3,), getattr(torch, dtype), seed=seed) for seed in (1, 2)]
    tree = flat(*(whole(f"h.{number}.w", part) for number, part in enumerate(data)))
    check_same(unstack_layers(stack_layers(tree, "h"), "h"), tree)
    check_same(split_tensor(merge_tensors(tree, list(tree), "w"), "w", list(tree)), tree)


def test_experts_within_layers_are_stacked_by_a_star() -> None:
    keys = [f"layers.{layer}.experts.{expert}.w" for layer in range(2) for expert in range(3)]
    tree = flat(*(whole(key, torch.tensor([number])) for number, key in enumerate(keys)))
    stacked = stack_layers(tree, "layers.*.experts")
    assert {key: leaf.data.flatten().tolist() for key, leaf in stacked.items()} == {
        "layers.0.experts.w": [0, 1, 2],
        "layers.1.experts.w": [3, 4, 5],
    }
    check_same(unstack_layers(stacked, "layers.*.experts"), tree)


def test_boxes_of_some_layers_are_taken_apart_by_their_own_numbers() -> None:
    half = st.ShardedTensor.from_rank_offsets("h.w", torch.arange(6).reshape(2, 3), (0, 1, 2), (1, 0, 4))
    one = st.ShardedTensor.from_rank_offsets("h.b", torch.arange(3), (0, 5, 6), prepend_axis_num=1)
    found = unstack_layers(flat(half, one), "h")
    assert {key: (leaf.data.tolist(), leaf.global_shape, leaf.global_offset) for key, leaf in found.items()} == {
        "h.2.w": ([0, 1, 2], (12,), (0,)),
        "h.3.w": ([3, 4, 5], (12,), (0,)),
        "h.5.b": ([0, 1, 2], (3,), (0,)),
    }


def test_what_has_a_number_already_and_what_is_no_shard_stays() -> None:
    rest = {"h.0.w": whole("h.0.w", torch.ones(1)), "rng": st.ShardedObject("h.rng", 1, (1,), (0,)), "step": 3}
    found = unstack_layers({**rest, "h.b": whole("h.b", torch.ones(1, 2))}, "h")
    assert {key: found[key] for key in rest} == rest and list(found) == [*rest, "h.0.b"]


def test_views_share_memory_and_stacks_do_not() -> None:
    data = torch.arange(4)
    parts = split_tensor(flat(whole("qk", data)), "qk", ["q", "k"])
    assert parts["k"].data.data_ptr() == data[2:].data_ptr()
    assert unstack_layers(flat(whole("h.w", data)), "h")["h.3.w"].data.data_ptr() == data[3:].data_ptr()
    assert merge_tensors(parts, ["q", "k"], "qk")["qk"].data.data_ptr() != data.data_ptr()


def test_partial_rename_fills_in_stars_and_leaves_the_rest() -> None:
    tree = {"a": whole("decoder.layers.3.fc1.weight", torch.ones(1)), "b": st.ShardedObject("rng", 1, (1,), (0,))}
    found = check_pure(partial_rename, tree, {"decoder.layers.*.fc1.*": "model.*.up.*", "rng": "rng_state"})
    assert {entry: leaf.key for entry, leaf in found.items()} == {"a": "model.3.up.weight", "b": "rng_state"}

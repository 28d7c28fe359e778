"""Edits of shards, metadata by key, and pipelines of tree functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardtree
from shardtree._later import ROOMS
from shardtree.core.trees import match_key
from shardtree.errors import KeyMismatch, ShapeError, TreeError
from shardtree.mapping import LocalNonpersistentObject, ShardedBase, ShardedObject, ShardedTensor, ShardedTensorFactory
from shardtree.trees import (
    apply_factories,
    bind,
    cast,
    compose,
    extract_metadata,
    leaves_with_paths,
    map_data,
    narrow,
    prefix,
    rename,
    without_data,
)
from tests.core.trees.samples import assert_caught, flat_shard, halves, join_halves, outline, trees

W = ShardedTensor.from_rank_offsets("w", torch.arange(8.0).reshape(4, 2), (0, 1, 2))
FACTORY = ShardedTensorFactory("f", torch.arange(4.0), halves, join_halves)
RNG = ShardedObject("rng", [1], (2,), (1,))


def keys(tree: Any) -> list[str]:
    return [leaf.key for _, leaf in leaves_with_paths(tree) if isinstance(leaf, ShardedBase)]


Rename = Callable[[Any, Any], Any]


def inverts(rename_: Rename, tree: Any) -> None:
    forth = {key: f"{key}.{index}" for index, key in enumerate(dict.fromkeys(keys(tree)))}
    there = rename_(tree, forth)
    assert keys(there) == [forth[key] for key in keys(tree)]
    assert outline(rename_(there, {new: old for old, new in forth.items()})) == outline(rename_(tree, {}))


@given(trees())
def test_rename_is_undone_by_the_inverse(tree: Any) -> None:
    inverts(rename, tree)


def test_rename_is_undone_catches_lost_factories() -> None:
    def shards_alone(tree: Any, names: Any) -> Any:
        return rename(tree, {key: new for key, new in names.items() if not key.startswith("a")})

    assert_caught(inverts, shards_alone, trees())


def test_rename_swaps_and_refuses_collisions() -> None:
    tree = {"w": W, "o": [RNG, FACTORY, W], "step": 3}
    assert keys(rename(tree, {"w": "rng", "rng": "w"})) == ["w", "f", "rng", "rng"]
    assert keys(apply_factories(rename(tree, str.upper))) == ["RNG", "F.0", "F.1", "W", "W"]
    with pytest.raises(TreeError, match="'rng' from 'rng', 'w'"):
        rename(tree, {"w": "rng"})
    with pytest.raises(KeyMismatch, match=r"'wt' \(did you mean 'w'\?\)"):
        rename(tree, {"wt": "v", "w": "u"})
    assert keys(prefix(tree, "model.")) == ["model.rng", "model.f", "model.w", "model.w"]


def test_cast_changes_floating_point_shards_alone() -> None:
    ids = ShardedTensor.from_rank_offsets("ids", torch.arange(3))
    tree = {"w": W, "ids": ids, "f": FACTORY, "plain": torch.ones(1), "empty": W.without_data(), "rng": RNG}
    half = cast(tree, torch.float16)
    assert half["w"] == replace(W, dtype=torch.float16, data=half["w"].data)
    assert half["w"].data.dtype == torch.float16
    assert half["f"].data.dtype == torch.float16
    assert half["empty"].dtype == torch.float16
    assert all(half[key] is tree[key] for key in ("ids", "plain", "rng"))
    assert cast(half, torch.float16) is half


def test_cast_of_a_lazy_or_absent_tensor() -> None:
    shapes = map_data(lambda data: tuple(data.shape), [FACTORY])
    assert cast(shapes, torch.float16) is shapes


@pytest.mark.parametrize("make", [lambda shard: shard, lambda shard: shard.without_data()], ids=["held", "absent"])
def test_cast_of_four_bit_floats_is_refused_by_name(make: Any) -> None:
    pairs = make(ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3).byte().view(torch.float4_e2m1fn_x2)))
    tree = {"w": pairs, "b": ShardedTensor.from_rank_offsets("b", torch.ones(2))}
    with pytest.raises(ShapeError, match=r"cannot convert these to torch\.bfloat16\n  'w': torch\.float4\w+\n.*keys="):
        cast(tree, torch.bfloat16)
    with pytest.raises(ShapeError, match=r"'b': torch\.float32"):
        cast(tree, torch.float4_e2m1fn_x2)
    half = cast(tree, torch.bfloat16, ["b"])
    assert half["w"] is pairs and half["b"].dtype == torch.bfloat16
    assert cast({"w": pairs}, torch.float4_e2m1fn_x2)["w"] is pairs


def casts_what_matches(cast_some: Any, drawn: tuple[Any, str]) -> None:
    tree, pattern = drawn
    try:
        found = cast_some(tree, torch.float16, [pattern])
    except TreeError:
        return
    for (path, leaf), (_, new) in zip(leaves_with_paths(tree), leaves_with_paths(found), strict=True):
        matches = isinstance(leaf, (ShardedTensor, ShardedTensorFactory)) and match_key(pattern, leaf.key) is not None
        if not matches:
            assert new is leaf, path
        else:
            assert (new.data.dtype, new.data.tolist()) == (torch.float16, leaf.data.half().tolist()), path


SOME = st.tuples(trees(), st.sampled_from(["a", "a*", "*b", "**", "c.**"]))


@given(SOME)
def test_cast_by_pattern_touches_what_matches_and_nothing_else(drawn: tuple[Any, str]) -> None:
    casts_what_matches(cast, drawn)


def test_the_law_of_patterns_catches_a_cast_of_what_only_begins_alike() -> None:
    def by_beginning(tree: Any, dtype: torch.dtype, keys: list[str]) -> Any:
        first = keys[0].strip("*.")
        return cast(tree, dtype, [f"{first}**"])

    assert_caught(casts_what_matches, by_beginning, SOME)


def test_narrow_puts_a_shard_for_a_box_and_a_list_for_a_flat_one() -> None:
    flat = flat_shard("flat", torch.arange(6.0))
    narrowed = narrow({"w": W, "flat": flat, "step": 3}, 1, 1, 1)
    assert narrowed["w"].data.tolist() == [[1], [3], [5], [7]]
    assert narrowed["w"].global_shape == (8, 1)
    assert [part.data.tolist() for part in narrowed["flat"]] == [[0], [4]]
    assert narrowed["step"] == 3
    assert narrowed["w"].data.untyped_storage().data_ptr() == W.data.untyped_storage().data_ptr()
    with pytest.raises(ShapeError) as caught:
        narrow({"a": [W]}, 1, 1, 5)
    assert caught.value.__notes__ == ["at tree['a'][0]"]


def test_without_data() -> None:
    tree = {"w": W, "f": FACTORY, "rng": RNG, "local": LocalNonpersistentObject([1]), "step": 3}
    bare = without_data(tree)
    assert all(bare[key] == tree[key].without_data() for key in ("w", "f", "rng"))
    assert bare["local"] is tree["local"]
    assert without_data(bare) is bare


def test_metadata_is_flat_by_key() -> None:
    other = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2), (0, 0, 2))
    metadata = extract_metadata({"a": [W, 3, other], "f": FACTORY, "first": 1, "rng": RNG, "step": 3})
    assert sorted(metadata) == ["f.0", "f.1", RNG.unique_key, "w"]
    assert metadata["w"] == W.without_data()
    assert metadata[RNG.unique_key] == RNG.without_data()


@given(st.lists(st.integers()))
def test_compose_reads_left_to_right(numbers: list[int]) -> None:
    steps = [bind(lambda seen, number: (*seen, number), number) for number in numbers]
    assert compose(*steps)(()) == tuple(numbers)


def scaled(state: int, by: int, tree: int = 0) -> tuple[int, int, int]:
    return state, by, tree


@pytest.mark.parametrize(
    "bound",
    [
        bind(lambda anything, by: (anything, by, 0), 2),
        bind(lambda tree, by, state_dict=0: (tree, by, state_dict), 2),
        bind(scaled, 2, tree=0),
        bind(partial(lambda f, tree: (tree, f, 0), 2)),
        bind(lambda *values: (*values, 0), 2),
    ],
)
def test_bind_takes_functions_with_any_first_name(bound: Callable[[int], Any]) -> None:
    assert bound(1) == (1, 2, 0)


def test_bind_takes_builtins_without_a_signature() -> None:
    assert bind(max, 3)(2) == 3


def is_refused(function: Callable[..., Any]) -> bool:
    try:
        bind(function)
    except TreeError:
        return True
    return False


def test_public_functions_take_the_tree_first_but_for_maps_and_plans_of_buffers() -> None:
    rooms = (shardtree, *map(import_module, (f"shardtree.{room}" for room in ROOMS)))
    functions = {name: value for room in rooms for name in room.__all__ if callable(value := getattr(room, name))}
    refused = {name for name, value in functions.items() if inspect.isfunction(value) and is_refused(value)}
    assert refused == {
        *("broadcast_prefix", "buffer_slices", "map_data", "map_shards", "map_with_path", "reduce_elements"),
    }

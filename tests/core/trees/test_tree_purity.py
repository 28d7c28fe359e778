"""No function of trees changes its arguments; what changed has containers of its own, what didn't is shared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given

from shardtree.core.trees import (
    build_factories,
    common_with_holes,
    join,
    left_out,
    map_sharing,
    merge_into_held,
    prune,
    shard_leaves,
    unite,
    united,
    with_data,
    without_holes,
)
from shardtree.errors import CheckpointingException
from shardtree.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory
from shardtree.trees import (
    HOLE,
    apply_factories,
    apply_factory_merges,
    bind,
    cast,
    combine,
    compose,
    diff,
    extract_metadata,
    extract_nonpersistent,
    extract_sharded,
    flatten_with_paths,
    leaves_with_paths,
    map_data,
    map_shards,
    merge,
    narrow,
    partition,
    prefix,
    rebox,
    rename,
    restrict,
    select,
    unbox,
    without_data,
)
from tests.core.trees.samples import assert_caught, frozen, mutable_nodes, nodes, outline, trees

Of = Callable[[Any], Any]


def data_of(leaf: Any) -> Any:
    return getattr(leaf, "data", leaf)


def merged(tree: Any) -> Any:
    return apply_factory_merges(map_shards(data_of, apply_factories(tree)), tree)


def loaded(leaf: Any) -> Any:
    return leaf.data if isinstance(leaf, ShardedBase) else HOLE


def is_boxed(leaf: Any) -> bool:
    return isinstance(leaf, (ShardedTensor, ShardedTensorFactory))


W = ShardedTensor.from_rank_offsets("w", torch.ones(2))

NEW: dict[str, Of] = {
    "map_shards": lambda tree: map_shards(lambda leaf: leaf, tree),
    "map_data": lambda tree: map_data(torch.neg, [W, tree]),
    "partition": lambda tree: partition(tree, lambda leaf: leaf is None),
    "extract_sharded": extract_sharded,
    "extract_nonpersistent": extract_nonpersistent,
    "extract_metadata": extract_metadata,
    "flatten_with_paths": lambda tree: (lambda pairs, rebuild: rebuild([leaf for _, leaf in pairs]))(
        *flatten_with_paths(tree)
    ),
    "leaves_with_paths": leaves_with_paths,
    "shard_leaves": shard_leaves,
    "with_data": lambda tree: map_shards(lambda leaf: with_data(leaf, None) if is_boxed(leaf) else leaf, tree),
    "diff": lambda tree: diff(tree, map_shards(lambda leaf: leaf, tree)),
}
SHARING: dict[str, Of] = {
    "common_with_holes": common_with_holes,
    "without_holes": without_holes,
    "map_sharing": lambda tree: map_sharing(lambda leaf: leaf, tree),
    "apply_factories": apply_factories,
    "build_factories": lambda tree: build_factories(tree)[0],
    "prefix": lambda tree: prefix(tree, "p."),
    "rename": lambda tree: rename(tree, lambda key: {"a": "z"}.get(key, key)),
    "cast": lambda tree: cast(tree, torch.float16),
    "unbox": unbox,
    "without_data": without_data,
    "apply_factory_merges": lambda tree: apply_factory_merges(tree, map_shards(lambda leaf: None, tree)),
    "compose": compose(unbox, bind(prefix, "p.")),
    "prune": prune,
}
JOINING: dict[str, Of] = {
    "merge": lambda tree: merge(tree, map_shards(lambda leaf: HOLE, tree)),
    "combine": lambda tree: combine(tree, map_shards(lambda leaf: HOLE, tree)),
    "join": lambda tree: join(tree, map_shards(lambda leaf: HOLE, tree)),
    "join_target": lambda tree: join(common_with_holes(tree), map_shards(loaded, tree)),
    "rebox": lambda tree: rebox(tree, unbox(tree)),
    "select": lambda tree: select(tree, "a*"),
    "restrict": lambda tree: restrict(tree, tree),
    "united": lambda tree: united([tree, common_with_holes(tree)]),
    "unite": lambda tree: unite({0: tree, 1: common_with_holes(tree)}),
    "narrow": lambda tree: narrow(apply_factories(tree), 0, 0, 0),
    "merged": merged,
    "left_out": lambda tree: left_out(common_with_holes(tree), tree),
    "merge_into_held": lambda tree: merge_into_held("load", tree),
}
EVERY = NEW | SHARING | JOINING


def changes_no_argument(f: Of, tree: Any) -> None:
    before = frozen(tree)
    with contextlib.suppress(CheckpointingException):
        f(tree)
    assert frozen(tree) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
@given(tree=trees())
def test_no_argument_is_changed(name: str, tree: Any) -> None:
    changes_no_argument(EVERY[name], tree)


def sorts_in_place(tree: Any) -> None:
    if isinstance(tree, dict):
        tree.update(dict.fromkeys(tree))


def adds_in_place(tree: Any) -> None:
    map_data(lambda data: data.add_(1), tree)


@pytest.mark.parametrize("fault", [sorts_in_place, adds_in_place])
def test_no_argument_is_changed_catches(fault: Of) -> None:
    assert_caught(changes_no_argument, fault, trees())


def makes_new_containers(f: Of, tree: Any) -> None:
    assert not mutable_nodes(tree).keys() & mutable_nodes(f(tree)).keys()


@pytest.mark.parametrize("name", NEW)
@given(tree=trees())
def test_a_map_makes_new_containers(name: str, tree: Any) -> None:
    try:
        makes_new_containers(NEW[name], tree)
    except CheckpointingException:
        assert name == "extract_metadata"


def test_a_map_makes_new_containers_catches_sharing() -> None:
    assert_caught(makes_new_containers, unbox, trees())


def shares_what_stays(f: Of, tree: Any) -> None:
    result = f(tree)
    for node in nodes(tree):
        if outline(f(node)) == outline(node):
            assert f(node) is node
    assert outline(result) != outline(tree) or result is tree


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARING)
@given(tree=trees())
def test_an_unchanged_subtree_is_shared(name: str, tree: Any) -> None:
    try:
        shares_what_stays(SHARING[name], tree)
    except CheckpointingException:
        assert name == "rename"


def test_an_unchanged_subtree_is_shared_catches_copies() -> None:
    assert_caught(shares_what_stays, lambda tree: map_shards(lambda leaf: leaf, tree), trees())

"""Trees of every kind of container and leaf, and what the laws of trees ask about them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException

from shardtree.errors import CheckpointingException
from shardtree.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory


class Pair(NamedTuple):
    first: Any
    second: Any


class Config(dict[Any, Any]):
    """A subclass of dict, as configuration libraries have them."""


def halves(key: str, data: Any, replica_id: Any, flattened_range: slice | None) -> Any:
    parts = [data[:1], data[1:]]
    return {"parts": [ShardedTensor.from_rank_offsets(f"{key}.{i}", part) for i, part in enumerate(parts)]}


def join_halves(built: Any) -> torch.Tensor:
    return torch.cat(list(built["parts"]))


def twice(key: str, data: Any, replica_id: Any, flattened_range: slice | None) -> Any:
    """Build a factory beside a shard: factories may stand in what factories build."""
    inner = ShardedTensorFactory(f"{key}.inner", data[:2], halves, join_halves)
    return (inner, ShardedTensor.from_rank_offsets(f"{key}.rest", data[2:]))


KEYS = st.text("abc", min_size=1, max_size=3)
TENSORS = st.lists(st.integers(-3, 3), max_size=4).map(lambda values: torch.tensor(values, dtype=torch.float32))


def shards() -> st.SearchStrategy[ShardedTensor]:
    return st.builds(ShardedTensor.from_rank_offsets, KEYS, TENSORS)


def flat_shard(key: str, data: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets_flat(key, data, (2, 4), flattened_range=slice(1, 1 + len(data)))


def flat_shards() -> st.SearchStrategy[ShardedTensor]:
    return st.builds(flat_shard, KEYS, TENSORS)


def factories() -> st.SearchStrategy[ShardedTensorFactory]:
    pairs = st.sampled_from([(halves, join_halves), (twice, lambda built: torch.cat([built[0], built[1]]))])
    return st.builds(lambda key, data, pair: ShardedTensorFactory(key, data, *pair), KEYS, TENSORS, pairs)


def plain_values() -> st.SearchStrategy[Any]:
    return st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["text", 0.5, torch.Size([2])]) | TENSORS


def leaves() -> st.SearchStrategy[Any]:
    objects = st.builds(ShardedObject, KEYS, st.integers(0, 3), st.just((2,)), st.sampled_from([(0,), (1,)]))
    local = st.builds(LocalNonpersistentObject, st.integers(0, 3))
    return plain_values() | shards() | flat_shards() | factories() | objects | local


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    many = st.lists(children, max_size=3)
    named = st.dictionaries(KEYS | st.integers(0, 3), children, max_size=3)
    return st.one_of(
        named,
        many,
        many.map(tuple),
        many.map(lambda values: deque(values, maxlen=5)),
        named.map(OrderedDict),
        named.map(lambda values: defaultdict(list, values)),
        named.map(Config),
        st.builds(Pair, children, children),
    )


def trees(of: st.SearchStrategy[Any] | None = None) -> st.SearchStrategy[Any]:
    return st.recursive(leaves() if of is None else of, containers, max_leaves=8)


def nodes(tree: Any) -> Iterator[Any]:
    """Yield every container of a tree, the tree first."""
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple, deque)) else None
    if children is not None and not isinstance(tree, torch.Size):
        yield tree
        for child in children:
            yield from nodes(child)


def frozen(tree: Any) -> Any:
    """Return what a tree holds by structure and identity: equal before and after means that nothing was changed."""
    if isinstance(tree, dict):
        return type(tree), id(tree), [(key, frozen(child)) for key, child in tree.items()]
    if isinstance(tree, (list, tuple, deque)):
        return type(tree), id(tree), [frozen(child) for child in tree]
    data = tree if isinstance(tree, torch.Tensor) else getattr(tree, "data", None)
    return id(tree), data._version if isinstance(data, torch.Tensor) else data


def outline(tree: Any) -> Any:
    """Return what a tree holds by structure, order and leaf: equal outlines are equal trees."""
    if isinstance(tree, dict):
        kind = dict if isinstance(tree, Config) else type(tree)
        return kind, [(key, outline(child)) for key, child in tree.items()]
    if isinstance(tree, (list, tuple, deque)) and not isinstance(tree, torch.Size):
        return type(tree), [outline(child) for child in tree]
    return id(tree) if isinstance(tree, torch.Tensor) else (type(tree), tree)


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for entry in path:
        tree = tree[entry]
    return tree


def mutable_nodes(tree: Any) -> dict[int, Any]:
    return {id(node): node for node in nodes(tree) if not isinstance(node, tuple)}


def assert_caught(law: Callable[..., None], fault: Any, *strategies: st.SearchStrategy[Any]) -> None:
    """Assert that a law fails for a faulty function, so that it could fail for ours."""

    @settings(phases=[Phase.generate], database=None, max_examples=3000, derandomize=True)
    @given(st.tuples(*strategies))
    def run(arguments: tuple[Any, ...]) -> None:
        law(fault, *arguments)

    with pytest.raises((AssertionError, CheckpointingException, ExceptionGroup)) as caught:
        run()
    assert not isinstance(caught.value, HypothesisException), caught.value  # the law wasn't called as it should be

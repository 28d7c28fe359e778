"""Trees of every kind of container and leaf, and what the laws of trees ask about them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

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
TENSORS = st.lists(st.integers(-3, 3), min_size=0, max_size=4).map(lambda values: torch.tensor(values, dtype=torch.float32))


def shards() -> st.SearchStrategy[ShardedTensor]:
    return st.builds(ShardedTensor.from_rank_offsets, KEYS, TENSORS)


def flat_shards() -> st.SearchStrategy[ShardedTensor]:
    return st.builds(
        lambda key, data: ShardedTensor.from_rank_offsets_flat(key, data, (2, 4), flattened_range=slice(1, 1 + len(data))),
        KEYS,
        TENSORS,
    )


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


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    for node in [*nodes(tree)]:
        for child in node.values() if isinstance(node, dict) else node:
            data = getattr(child, "data", None) if not isinstance(child, torch.Tensor) else child
            if isinstance(data, torch.Tensor):
                yield data


def frozen(tree: Any) -> Any:
    """Return what a tree holds by structure and identity: equal before and after means that nothing was changed."""
    if isinstance(tree, dict):
        return type(tree), id(tree), [(key, frozen(child)) for key, child in tree.items()]
    if isinstance(tree, (list, tuple, deque)):
        return type(tree), id(tree), [frozen(child) for child in tree]
    data = tree if isinstance(tree, torch.Tensor) else getattr(tree, "data", None)
    return id(tree), data._version if isinstance(data, torch.Tensor) else data

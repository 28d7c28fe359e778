"""What the tests of transforms share: flat trees of drawn tensors, made lazy, and compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as some

import shardtree as st
from shardtree.core.lazy import LazyTensor, stored
from shardtree.testing import PRINTABLE_DTYPES, check_pure, first_difference, random_bits

Tree = dict[str, Any]

# Torch warns of complex32 wherever it meets it, in the description of a lazy tensor too.
DTYPES = some.sampled_from([dtype for dtype in PRINTABLE_DTYPES if dtype != torch.complex32])


def whole(key: str, data: Any) -> st.ShardedTensor:
    return st.ShardedTensor.from_rank_offsets(key, data)


def flat(*shards: Any) -> Tree:
    return {shard.key: shard for shard in shards}


def two_of_a_kind(draw: some.DrawFn, key: str, shape: list[int], axis: int) -> Tree:
    """Return two layers' tensors of a shape, of which another axis may be cut, and one of no layer."""
    dtype, axes = draw(DTYPES), len(shape)
    other = draw(some.sampled_from([None, *(at for at in range(axes) if at != axis % axes)]))
    ranks = [] if other is None else [(other, 1, 3)]
    datas = [random_bits(tuple(shape), dtype, seed=draw(some.integers(0, 99))) for _ in range(2)]
    shards = [
        st.ShardedTensor.from_rank_offsets(key.replace("*", str(n)), data, *ranks) for n, data in enumerate(datas)
    ]
    return flat(*shards, whole("norm", torch.ones(2)))


def lazily(tree: Tree) -> Tree:
    """Return the tree with the same data, to be read when asked for."""

    def lazy(leaf: Any) -> Any:
        def read_box(offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
            box = tuple(slice(low, low + size) for low, size in zip(offset, shape, strict=True))
            return leaf.data.contiguous()[box].clone()

        if not isinstance(leaf, st.ShardedTensor):
            return leaf
        return replace(leaf, data=stored(read_box, leaf.data.shape, leaf.dtype, name=leaf.key))

    return st.map_shards(lazy, tree)


def without_data(tree: Tree) -> Tree:
    return st.without_data(tree)


def check_same(found: Tree, expected: Tree) -> None:
    """Raise unless two flat trees hold the same entries, metadata and bits."""
    assert set(found) == set(expected), f"entries {sorted(found)}, not {sorted(expected)}"
    for key, leaf in expected.items():
        assert replace(found[key], data=None) == replace(leaf, data=None), f"{key} has other metadata"
        data = found[key].data
        assert (data is None) == (leaf.data is None)
        if data is not None:
            read = data.read() if isinstance(data, LazyTensor) else data
            assert first_difference(read, leaf.data) is None, key


def check_undone(there: Callable[[Tree], Tree], back: Callable[[Tree], Tree], tree: Tree) -> None:
    """Raise unless one function undoes the other, on tensors in memory, on lazy ones and on absent ones."""
    check_same(check_pure(back, check_pure(there, tree)), tree)
    lazy = back(there(lazily(tree)))
    assert all(isinstance(leaf.data, LazyTensor) for leaf in lazy.values()), "lazy tensors were read"
    check_same(lazy, tree)
    check_same(back(there(without_data(tree))), without_data(tree))

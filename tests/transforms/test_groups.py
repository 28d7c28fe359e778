from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.testing import random_bits
from shardtree.transforms import merge_tensors, split_tensor
from tests.transforms.flat_trees import DTYPES, Tree, check_same, check_undone, flat, lazily, whole

NAMES = ["h.*.q", "h.*.k", "h.*.v"]
Grouped = tuple[Tree, list[int], int, int]


@some.composite
def grouped(draw: some.DrawFn) -> Grouped:
    """Return two layers' tensors of groups of three parts, the parts' sizes, the axis and the number of groups."""
    groups, axes = draw(some.integers(1, 4)), draw(some.integers(1, 3))
    axis = draw(some.integers(-axes, axes - 1))
    sizes = [groups * draw(some.integers(0, 3)) for _ in NAMES]
    shape = [draw(some.integers(0, 3)) for _ in range(axes)]
    shape[axis] = sum(sizes)
    dtype = draw(DTYPES)
    other = draw(some.sampled_from([None, *(at for at in range(axes) if at != axis % axes)]))
    ranks = [] if other is None else [(other, 1, 3)]
    datas = [random_bits(tuple(shape), dtype, seed=draw(some.integers(0, 99))) for _ in range(2)]
    shards = [st.ShardedTensor.from_rank_offsets(f"h.{i}.qkv", data, *ranks) for i, data in enumerate(datas)]
    return flat(*shards, whole("norm", torch.ones(2))), sizes, axis, groups


def by_reshaping(tree: Tree, sizes: list[int], axis: int, groups: int) -> dict[str, list[Any]]:
    """Return what numpy makes of it: a new axis for the groups, cut behind it, taken away again."""
    found = {}
    for key in ("h.0.qkv", "h.1.qkv"):
        data = tree[key].data
        bits = np.moveaxis(data.contiguous().view(torch.uint8).numpy().reshape(*data.shape, -1), axis % data.ndim, 0)
        apart = bits.reshape(groups, len(bits) // groups, *bits.shape[1:])
        cuts = np.cumsum([size // groups for size in sizes])[:-1]
        parts = [part.reshape(-1, *bits.shape[1:]) for part in np.split(apart, cuts, axis=1)]
        found[key] = [np.moveaxis(part, 0, axis % data.ndim).tolist() for part in parts]
    return found


def check_parts(split: Callable[[Tree], Tree], drawn: Grouped) -> None:
    """Raise unless a function cuts each group as numpy does, of tensors in memory and of lazy ones."""
    tree, sizes, axis, groups = drawn
    if not all(tree["h.0.qkv"].data.shape):
        return
    expected = by_reshaping(tree, sizes, axis, groups)
    for found, read in ((split(tree), lambda data: data), (split(lazily(tree)), lambda data: data.read())):
        for layer in range(2):
            for name, part in zip(NAMES, expected[f"h.{layer}.qkv"], strict=True):
                data = read(found[name.replace("*", str(layer))].data).contiguous()
                bits = data.view(torch.uint8).reshape(*data.shape, data.dtype.itemsize)
                assert bits.tolist() == part, f"{name} of layer {layer} has other elements"


@pytest.mark.slow
@given(grouped())
def test_merge_undoes_split_by_groups(drawn: Grouped) -> None:
    tree, sizes, axis, groups = drawn
    split = st.bind(split_tensor, "h.*.qkv", NAMES, sizes=sizes, axis=axis, groups=groups)
    check_undone(split, st.bind(merge_tensors, NAMES, "h.*.qkv", axis=axis, groups=groups), tree)
    parts = split(tree)
    check_undone(st.bind(merge_tensors, NAMES, "h.*.qkv", axis=axis, groups=groups), split, parts)


@given(grouped())
def test_split_cuts_each_group(drawn: Grouped) -> None:
    _, sizes, axis, groups = drawn
    check_parts(st.bind(split_tensor, "h.*.qkv", NAMES, sizes=sizes, axis=axis, groups=groups), drawn)


QKV = torch.arange(24).reshape(12, 2)  # 2 groups of [q q q q k v]
SIZES = [8, 2, 2]


def test_the_laws_catch_a_cut_that_ignores_groups() -> None:
    tree = flat(*(whole(f"h.{layer}.qkv", QKV + layer) for layer in range(2)))
    check_parts(st.bind(split_tensor, "h.*.qkv", NAMES, sizes=SIZES, groups=2), (tree, SIZES, 0, 2))
    with pytest.raises(AssertionError, match=r"h\.\*\.q of layer 0 has other elements"):
        check_parts(st.bind(split_tensor, "h.*.qkv", NAMES, sizes=SIZES), (tree, SIZES, 0, 2))
    apart = split_tensor(tree, "h.*.qkv", NAMES, sizes=SIZES, groups=2)
    with pytest.raises(AssertionError, match=r"h\.0\.qkv"):
        check_same(merge_tensors(apart, NAMES, "h.*.qkv"), tree)


def test_the_groups_of_ranks_are_the_groups_of_the_whole() -> None:
    """What makes Megatron-Core's QKV one tensor whatever the number of ranks: whole groups lie on each."""
    tree = flat(whole("h.0.qkv", torch.cat([QKV, QKV + 100])))
    both = split_tensor(tree, "h.*.qkv", NAMES, sizes=[16, 4, 4], groups=4)
    ranks = [
        split_tensor(flat(whole("h.0.qkv", part)), "h.*.qkv", NAMES, sizes=SIZES, groups=2) for part in (QKV, QKV + 100)
    ]
    for key, shard in both.items():
        assert torch.equal(shard.data, torch.cat([rank[key].data for rank in ranks]))

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.transforms import merge_tensors, split_tensor
from tests.transforms.flat_trees import Tree, check_same, check_undone, flat, lazily, two_of_a_kind, whole

NAMES = ["h.*.q", "h.*.k", "h.*.v"]
Grouped = tuple[Tree, list[int], int, int]


@some.composite
def grouped(draw: some.DrawFn) -> Grouped:
    """Return two layers' tensors of groups of parts, the parts' sizes, the axis and the number of groups."""
    groups, axes = draw(some.integers(1, 4)), draw(some.integers(1, 3))
    axis = draw(some.integers(-axes, axes - 1))
    sizes = [groups * size for size in draw(some.lists(some.integers(0, 3), min_size=1, max_size=len(NAMES)))]
    shape = [draw(some.integers(0, 3)) for _ in range(axes)]
    shape[axis] = sum(sizes)
    return two_of_a_kind(draw, "h.*.qkv", shape, axis), sizes, axis, groups


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
            for name, part in zip(NAMES, expected[f"h.{layer}.qkv"], strict=False):
                data = read(found[name.replace("*", str(layer))].data).contiguous()
                bits = data.view(torch.uint8).reshape(*data.shape, data.dtype.itemsize)
                assert bits.tolist() == part, f"{name} of layer {layer} has other elements"


@pytest.mark.slow
@given(grouped())
def test_merge_undoes_split_and_split_undoes_merge(drawn: Grouped) -> None:
    tree, sizes, axis, groups = drawn
    names = NAMES[: len(sizes)]
    split = st.bind(split_tensor, "h.*.qkv", names, sizes=sizes, axis=axis, groups=groups)
    merge = st.bind(merge_tensors, names, "h.*.qkv", axis=axis, groups=groups)
    check_undone(split, merge, tree)
    check_undone(merge, split, split(tree))


@given(grouped())
def test_split_cuts_each_group(drawn: Grouped) -> None:
    _, sizes, axis, groups = drawn
    check_parts(st.bind(split_tensor, "h.*.qkv", NAMES[: len(sizes)], sizes=sizes, axis=axis, groups=groups), drawn)


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

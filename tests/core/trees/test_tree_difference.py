"""Differences of trees: nothing differs from itself, and every change is found."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from shardtree.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
from shardtree.trees import Difference, diff, flatten_with_paths, map_data, map_shards
from tests.core.trees.samples import Config, Pair, halves, join_halves, trees

W = ShardedTensor.from_rank_offsets("w", torch.arange(4.0))
NAN = torch.tensor([float("nan")])
CHANGED = object()


@given(trees())
def test_a_copy_doesnt_differ(tree: Any) -> None:
    copied = map_data(torch.clone, map_shards(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, tree))
    assert diff(tree, copied) == Difference()


@given(trees(), st.integers(0, 9))
def test_a_changed_leaf_is_found_where_it_is(tree: Any, index: int) -> None:
    pairs, rebuild = flatten_with_paths(tree)
    assume(pairs)
    place = index % len(pairs)
    changed = rebuild([CHANGED if i == place else leaf for i, (_, leaf) in enumerate(pairs)])
    assert diff(tree, changed) == Difference(mismatch=(pairs[place][0],)) == diff(changed, tree)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (NAN, NAN.clone()),
        (torch.tensor(1j).conj(), torch.complex(torch.tensor(0.0), torch.tensor(-1.0))),
        (torch.ones(2, 3).T, torch.ones(3, 2)),
        (torch.ones(1), torch.nn.Parameter(torch.ones(1))),
        (torch.ones((), dtype=torch.float8_e4m3fn), torch.ones((), dtype=torch.float8_e4m3fn)),
        (torch.empty(2, device="meta"), torch.empty(2, device="meta")),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse()),
        (np.array([1, np.nan]), np.array([1, np.nan])),
        (np.array([1, [2]], dtype=object), np.array([1, [2]], dtype=object)),
        (np.float32("nan"), np.float32("nan")),
        (float("nan"), float("nan")),
        (OrderedDict(a=1, b=2), Config(b=2, a=1)),
        (Pair(1, 2), (1, 2)),
        (deque([1]), [1]),
        (ShardedObject("o", [NAN], (1,), (0,)), ShardedObject("o", [NAN.clone()], (1,), (0,))),
        (LocalNonpersistentObject({"a": [1]}), LocalNonpersistentObject({"a": [1]})),
        (replace(W, data=None), W.without_data()),
    ],
)
def test_same_bits_are_equal(left: Any, right: Any) -> None:
    assert not diff([left], [right])
    assert not diff([right], [left])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.zeros(1), -torch.zeros(1)),
        (torch.ones(1), torch.ones(1, dtype=torch.float64)),
        (torch.ones(1), torch.ones(1, 1)),
        (torch.ones(1), torch.ones(1, device="meta")),
        (torch.eye(2).to_sparse(), torch.eye(2)),
        (np.ones(1), np.ones(1, dtype=np.float32)),
        (np.zeros(2), np.zeros(2, dtype=np.int64)),
        (np.zeros((1, 2)), np.zeros((2, 1))),
        (torch.zeros(1, 2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (complex(1, 0.0), complex(1, -0.0)),
        (complex(0.0, 1), complex(-0.0, 1)),
        (np.array([1, [2]], dtype=object), np.array([1, [3]], dtype=object)),
        (LocalNonpersistentObject({"a": [1]}), LocalNonpersistentObject({"a": [2]})),
        (ShardedObject("o", 1, (1,), (0,)), ShardedObject("o", 2, (1,), (0,))),
        (0.0, -0.0),
        (1, True),
        (1, 1.0),
        ([1], (1,)),
        ({0: 1}, [1]),
        (None, {}),
        (W, replace(W, key="v")),
        (W, W.without_data()),
        (W, ShardedTensorFactory("w", W.data, halves, join_halves)),
    ],
)
def test_other_bits_differ(left: Any, right: Any) -> None:
    assert diff([left], [right]) == Difference(mismatch=((0,),)) == diff([right], [left])


def test_what_only_one_has_is_on_its_side() -> None:
    found = diff({"a": [1, 2, 3], "b": 1}, {"a": [1], "c": {"d": 1}})
    assert found == Difference((("a", 1), ("a", 2), ("b",)), (("c",),))
    assert found


def test_values_that_refuse_to_be_compared_differ() -> None:
    class Stubborn:
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            raise RuntimeError

    assert diff([Stubborn()], [Stubborn()])


def test_a_single_element_may_keep_its_stride() -> None:
    tensor = torch.arange(8)[4::4]
    assert not diff({"w": tensor}, {"w": torch.tensor([4])})
    assert diff({"w": tensor}, {"w": torch.tensor([5])})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_differ_where_a_part_does(layout: torch.layout) -> None:
    def nested(*parts: list[float]) -> torch.Tensor:
        return torch.nested.nested_tensor([torch.tensor(part) for part in parts], layout=layout)

    assert not diff(nested([1.0], [2.0, 3.0]), nested([1.0], [2.0, 3.0]))
    others = (nested([1.0], [2.0, 4.0]), nested([1.0], [2.0]), nested([1.0]), torch.ones(2))
    assert all(diff(nested([1.0], [2.0, 3.0]), other) for other in others)

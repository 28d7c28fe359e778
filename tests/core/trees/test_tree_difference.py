"""Differences of trees: nothing differs from itself, and every change is found."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from shardtree.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
from shardtree.trees import Difference, diff, flatten_with_paths, map_data, map_shards
from tests.core.trees.samples import Config, Pair, assert_caught, halves, join_halves, trees

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


# -- tolerances


Diff = Callable[..., Any]
NUMBERS = st.sampled_from([0.0, -0.0, 1.0, 1.001, -2.5, 300.0, float("inf"), float("-inf"), float("nan")])
PAIRS = st.lists(st.tuples(NUMBERS, NUMBERS | st.none()), min_size=1, max_size=4)
TOLERANCES = st.sampled_from([(0, 0.5), (0.01, 0), (1e-4, 0.002), (0, 0), (float("inf"), 0)])
FORMS: list[Callable[[torch.Tensor], Any]] = [
    lambda data: data,
    lambda data: data.numpy(),
    lambda data: ShardedTensor.from_rank_offsets("w", data),
    lambda data: {"whole": data.reshape(1, -1).to(torch.complex64)},
    lambda data: data[0].item(),
]


def agrees_with_numpy(difference: Diff, leaves: list[tuple[list[Any], int]], tolerances: tuple[float, float]) -> None:
    """The law: a leaf differs if numpy says so of an element, the worst is first, and its error is numpy's."""
    rtol, atol = tolerances
    datas = [
        (torch.tensor([x for x, _ in of]), torch.tensor([x if y is None else y for x, y in of])) for of, _ in leaves
    ]
    left, right = ({n: FORMS[leaves[n][1]](pair[side]) for n, pair in enumerate(datas)} for side in (0, 1))
    found = difference(left, right, rtol=rtol, atol=atol)
    wrong = {}
    for n, pair in enumerate(datas):
        ours, theirs = (data[:1] if leaves[n][1] == 4 else data for data in pair)
        with np.errstate(invalid="ignore"):
            close = np.isclose(ours.numpy(), theirs.numpy(), rtol=0, atol=0, equal_nan=True)
            errors = np.abs(ours.double().numpy() - theirs.double().numpy())
            close |= np.isfinite(errors) & (errors <= atol + rtol * np.abs(theirs.double().numpy()))
        if not close.all():
            wrong[n] = errors[~close]
    assert {path[0] for path in found.mismatch} == wrong.keys() == {error.path[0] for error in found.errors}
    assert [error.path for error in found.errors] == [*found.mismatch]
    assert [error.excess for error in found.errors] == sorted((error.excess for error in found.errors), reverse=True)
    for error in found.errors:
        assert error.count == len(wrong[error.path[0]])
        same_kind = np.isin(error.error, wrong[error.path[0]]) or np.isnan(error.error)
        assert same_kind and len(error.index) == {3: 2, 4: 0}.get(leaves[error.path[0]][1], 1)


LEAVES = st.lists(st.tuples(PAIRS, st.integers(0, len(FORMS) - 1)), min_size=1, max_size=3)


@given(LEAVES, TOLERANCES)
def test_a_leaf_differs_if_an_element_is_beyond_its_tolerance(leaves: Any, tolerances: tuple[float, float]) -> None:
    agrees_with_numpy(diff, leaves, tolerances)


def test_a_leaf_differs_catches_tolerances_relative_to_the_left_tree() -> None:
    def other_way(left: Any, right: Any, **tolerances: float) -> Any:
        return diff(right, left, **tolerances)

    assert_caught(agrees_with_numpy, other_way, LEAVES, TOLERANCES)


def test_what_cannot_be_compared_comes_first() -> None:
    left = {"a": torch.zeros(2), "b": torch.zeros(2), "c": 1, "d": torch.ones(2, dtype=torch.int32), "e": W}
    right = {"a": torch.full((2,), 3.0), "b": torch.zeros(3), "c": 2, "d": torch.zeros(2, dtype=torch.int32)}
    found = diff(left, right | {"e": replace(W, key="v")}, atol=1)
    assert found.mismatch == (("b",), ("c",), ("d",), ("e",), ("a",))
    assert [error.path for error in found.errors] == [("a",)]
    assert found and not diff(left, left, atol=1)


def test_without_tolerances_nothing_is_forgiven() -> None:
    nearly = torch.tensor([1.0]), torch.tensor([1.0 + 2**-20])
    assert diff(*nearly) == Difference(mismatch=((),))
    assert not diff(*nearly, rtol=1e-5)
    assert diff(0.0, -0.0) and not diff(0.0, -0.0, atol=0)
    assert diff(NAN, torch.tensor([-NAN.item()])) and not diff(NAN, -NAN, rtol=0)
    assert diff(torch.ones(2), torch.ones(2).double(), atol=1).mismatch == ((),)


@pytest.mark.parametrize("make", [lambda: torch.empty(2, device="meta"), lambda: torch.eye(2).to_sparse()])
def test_tensors_that_torch_cannot_subtract_are_compared_exactly(make: Any) -> None:
    assert not diff(make(), make(), atol=1)
    assert diff(make(), torch.ones(2), atol=1).errors == ()

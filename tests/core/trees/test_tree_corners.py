"""Trees at their edges: what is empty, nested, of a kind of its own, or in the last place."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.core.lazy import as_integers
from shardtree.core.trees import empty_data, join_data, namedtuple_types, prune, refuse_hidden
from shardtree.errors import TreeError, UnsupportedValue
from shardtree.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from shardtree.trees import HOLE, Difference, apply_factory_merges, combine, diff, without_data
from tests.core.trees.samples import Pair, halves, join_halves

W = ShardedTensor.from_rank_offsets("w", torch.arange(4.0))
RNG = ShardedObject("rng", 1, (1,), (0,))


@dataclass
class Options:
    cache: Any = None
    late: Any = field(init=False)


@pytest.mark.parametrize(
    ("tree", "pruned"),
    [
        ([HOLE, HOLE], [HOLE, HOLE]),
        ((HOLE, {"a": HOLE}), (HOLE, HOLE)),
        ({"a": HOLE, "b": [HOLE]}, {}),
        ([], []),
        (HOLE, HOLE),
        ({"a": {}, "b": [[]]}, {"a": {}, "b": [[]]}),
        ({"a": [HOLE, {"b": HOLE, "c": 1}]}, {"a": [HOLE, {"c": 1}]}),
        (Pair(HOLE, HOLE), Pair(HOLE, HOLE)),
    ],
)
def test_pruning_takes_out_holes_and_what_holds_nothing_else(tree: Any, pruned: Any) -> None:
    found = prune(tree)
    assert found == pruned and type(found) is type(tree)


def test_a_difference_of_any_kind_is_true() -> None:
    path = ("a",)
    assert not Difference()
    assert all(map(bool, [Difference((path,)), Difference((), (path,)), Difference((), (), (path,))]))


def test_namedtuple_classes_are_found_below_others() -> None:
    assert namedtuple_types([1, {"a": (Pair(1, [Pair(2, 3)]),)}]) == (Pair,)
    assert namedtuple_types({"a": (1, 2), "b": torch.Size([1])}) == ()


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32, torch.bool, torch.float8_e4m3fn, torch.int64])
def test_memory_is_made_and_joined_bit_for_bit_in_every_size(dtype: torch.dtype) -> None:
    made = empty_data([2, 3], dtype, "cpu")
    assert (made.dtype, tuple(made.shape), made.device.type) == (dtype, (2, 3), "cpu")
    assert empty_data((1,), dtype, "meta").is_meta
    bits = torch.arange(made.nbytes, dtype=torch.uint8).remainder(2).view(dtype).view(2, 3)
    joined = join_data(torch.cat, [bits, bits], 1)
    assert (joined.dtype, tuple(joined.shape)) == (dtype, (2, 6))
    assert torch.equal(as_integers(joined[:, 3:]), as_integers(bits))
    assert tuple(join_data(torch.stack, [bits, bits], 2).shape) == (2, 3, 2)


def nested(levels: int) -> Options:
    tree: Any = [W]
    for _ in range(levels - 1):
        tree = [tree]
    return Options(tree)


def test_a_hundred_levels_are_searched_for_hidden_shards() -> None:
    refuse_hidden("save", [((), nested(101))])
    with pytest.raises(UnsupportedValue):
        refuse_hidden("save", [((), nested(100))])


def test_structures_of_torch_are_trees_of_their_own_kind() -> None:
    one, other = torch.return_types.topk((W, 1)), torch.return_types.topk((RNG, 1))
    assert not diff(one, torch.return_types.topk((W, 1)))
    assert diff(one, (W, 1)).mismatch == ((),)
    assert diff(one, other)
    with pytest.raises(TreeError, match="do not fit together"):
        combine(torch.return_types.topk((HOLE, 1)), (W, HOLE))
    factory = ShardedTensorFactory("f", torch.arange(4.0), halves, join_halves)
    loaded = torch.return_types.topk(({"parts": [torch.tensor([5.0]), torch.tensor([6.0])]}, 1))
    merged = apply_factory_merges({"a": loaded}, {"a": torch.return_types.topk((factory, 1))})
    assert type(merged["a"]) is torch.return_types.topk and merged["a"][0].tolist() == [5, 6]
    with pytest.raises(TreeError, match="another structure"):
        apply_factory_merges({"a": loaded}, {"a": torch.return_types.sort((factory, 1))})


def test_queues_keep_their_length() -> None:
    assert without_data({"q": deque([W, 1], maxlen=2)})["q"].maxlen == 2


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors_differ_where_their_values_do() -> None:
    one, same, other = (
        torch.quantize_per_tensor(torch.tensor([value]), 0.5, 0, torch.qint8) for value in (1.0, 1.0, 2.0)
    )
    assert not diff({"q": one}, {"q": same})
    assert diff({"q": one}, {"q": other})


def test_what_is_not_a_tensor_is_joined_by_the_function_itself() -> None:
    assert join_data(lambda parts, dim: (parts, dim), ["a", "b"], 1) == (["a", "b"], 1)


def test_a_class_given_as_a_transform_is_refused_by_name() -> None:
    with pytest.raises(st.errors.MetadataError, match=r"(?s)transform.*found type"):
        st.core.trees.target_through({}, st.Trace)

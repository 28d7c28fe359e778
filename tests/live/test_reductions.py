"""Reductions over global trees: each element once, in any layout, on one rank or many."""

from __future__ import annotations

import operator
from collections.abc import Callable
from math import inf, isnan
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import IntegrityError, MetadataError, RemoteError, WorldError
from shardtree.testing import glu
from shardtree.trees import leaves_with_paths, reduce_elements, tree_norm, tree_sum
from tests.core.trees.samples import assert_caught

MESH = st.Mesh(dp=2, tp=2)
SPECS = some.sampled_from([st.P(), st.P("tp"), st.P(None, "tp"), st.P(("dp", "tp")), st.P("tp", "dp")])
DTYPES = some.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
TENSORS = some.tuples(
    DTYPES, some.lists(some.integers(-3, 3), max_size=12).map(lambda values: values[: len(values) // 2 * 2])
)
Sum = Callable[..., Any]


def whole(tensors: list[tuple[torch.dtype, list[int]]]) -> dict[str, torch.Tensor]:
    return {f"w{n}": torch.tensor(values).reshape(-1, 2).to(dtype) for n, (dtype, values) in enumerate(tensors)}


def an_element_counts_once(total: Sum, tensors: list[Any], specs: list[Any]) -> None:
    """The law: small whole numbers, whose sums aren't rounded, have one sum in every layout."""
    state = whole(tensors)
    expected = sum(torch.sum(tensor.to(torch.complex128)).item() for tensor in state.values())
    assert total(state, world=st.world.one_process()) == expected
    trees = st.shard(state, MESH, {name: specs[n % len(specs)] for n, name in enumerate(state)})
    assert (
        st.simulate(4, lambda world: total(trees[world.rank] | {"step": torch.tensor(9)}, world=world))
        == [expected] * 4
    )


@settings(max_examples=30)
@given(some.lists(TENSORS, min_size=1, max_size=3), some.lists(SPECS, min_size=1, max_size=3))
def test_an_element_counts_once_in_every_layout(tensors: list[Any], specs: list[Any]) -> None:
    an_element_counts_once(tree_sum, tensors, specs)


def test_an_element_counts_once_catches_replicas_that_are_counted_too() -> None:
    def every_replica(tree: Any, *, world: Any) -> Any:
        def data(leaf: Any) -> Any:
            return leaf.data if isinstance(leaf, st.ShardedTensor) else leaf

        shards = [leaf for _, leaf in leaves_with_paths(tree) if isinstance(leaf, st.ShardedTensor)] or tree.values()
        return sum(world.all_gather(sum(data(leaf).to(torch.complex128).sum().item() for leaf in shards)))

    assert_caught(
        an_element_counts_once, every_replica, some.lists(TENSORS, min_size=1, max_size=3), some.just([st.P()])
    )


@pytest.mark.parametrize("order", [0.5, 1, 2, 3, inf])
def test_norms_are_torchs(order: float) -> None:
    state = {"w": torch.randn(4, 2), "b": torch.randn(6, 2, dtype=torch.complex64)}
    expected = torch.linalg.vector_norm(
        torch.cat([tensor.reshape(-1).abs() for tensor in state.values()]).double(), order
    )
    trees = st.shard(state, MESH, st.P("tp"))
    found = st.simulate(4, lambda world: tree_norm(trees[world.rank], ord=order, world=world))
    assert found == [found[0]] * 4
    assert found[0] == pytest.approx(expected.item(), rel=1e-6)


def test_norms_of_nothing_and_of_nan() -> None:
    assert tree_norm({}) == tree_norm({"w": torch.ones(0)}, ord=inf) == 0.0
    assert isnan(tree_norm({"w": torch.tensor([1.0, float("nan")]), "v": torch.ones(1)}, ord=inf))
    assert isnan(tree_norm({"v": torch.ones(1), "w": torch.tensor([float("nan"), 2.0])}, ord=inf))
    assert tree_sum({"n": 3, "text": "x"}) == 0
    for order in (0, -1, True, "2", float("nan")):
        with pytest.raises(MetadataError, match="tree_norm"):
            tree_norm({}, ord=order)  # type: ignore[arg-type]


def test_several_trees_and_other_ways_to_combine() -> None:
    left, right = ({"w": torch.arange(8.0).reshape(4, 2) + n} for n in range(2))
    lefts, rights = (st.shard(tree, MESH, st.P("tp")) for tree in (left, right))

    def dot(one: torch.Tensor, other: torch.Tensor) -> float:
        return (one * other).sum().item()

    def both(world: Any) -> tuple[Any, ...]:
        trees = lefts[world.rank], rights[world.rank]
        largest = reduce_elements(lambda data: data.max(), trees[0], combine=torch.maximum, world=world)
        none = reduce_elements(torch.sum, {}, initial="none", world=world)
        return reduce_elements(dot, *trees, world=world), largest.item(), none

    assert st.simulate(4, both) == [(dot(left["w"], right["w"]), 7.0, "none")] * 4


def test_flat_ranges_factories_and_lazy_tensors(tmp_path: Any) -> None:
    cuts = [slice(0, 2), slice(2, 7), slice(7, 8)]
    flat = [
        st.ShardedTensor.from_rank_offsets_flat("f", torch.ones(cut.stop - cut.start), (4, 2), flattened_range=cut)
        for cut in cuts
    ]
    tree = {"flat": flat, "glu": glu("g", torch.ones(4, 2)), "none": st.ShardedObject("rng", 1, (1,), (0,))}
    assert tree_sum(tree) == 16
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.arange(6.0))}, tmp_path / "c")
    opened = dict(st.open_checkpoint(tmp_path / "c"))
    assert tree_norm(opened) == tree_norm({"w": torch.arange(6.0)})
    assert reduce_elements(lambda data: data.numel(), opened, combine=operator.add) == 6


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (torch.int64, [2**63 - 1, 2**63 - 1, 5, -(2**63)]),
        (torch.int64, [-(2**63)] * 3),
        (torch.uint64, [2**64 - 1, 2**63, 2**32, 1]),
        (torch.uint64, [2**64 - 1] * 3),
        (torch.int8, [-128, 127]),
        (torch.bool, [True, True, False]),
        (torch.int32, []),
    ],
)
def test_integers_are_added_exactly(dtype: torch.dtype, values: list[int]) -> None:
    elements = torch.tensor(values, dtype=dtype)
    assert tree_sum({"a": elements, "b": [elements]}) == 2 * sum(values)
    assert tree_sum({"strided": elements.repeat_interleave(2)[::2]}) == sum(values)
    shards = st.ShardedTensor.from_rank_offsets("w", elements, (0, 0, 1))
    assert st.simulate(2, lambda world: tree_sum({"w": shards} if world.rank else {}, world=world)) == [sum(values)] * 2


def test_what_has_no_elements_is_named_on_every_rank() -> None:
    shard = st.ShardedTensor.from_rank_offsets("w", torch.ones(2))
    for tree in ({"a": st.without_data(shard)}, st.without_data({"a": shard}, meta=True)):
        with pytest.raises(IntegrityError, match=r"tensors that have no data\n  tree\['a'\]"):
            tree_sum(tree)

    def failing(world: Any) -> Any:
        return tree_sum({"a": shard.without_data() if world.rank else shard}, world=world)

    with pytest.raises(RemoteError, match="reduce_elements: reduce: failed on 1 rank"):
        st.simulate(2, failing)


@pytest.mark.parametrize(
    "replica_ids", [(0, 0), (1, 1)], ids=["a part that each rank calls the whole", "no main replica"]
)
def test_elements_that_no_rank_or_two_would_count_are_named(replica_ids: tuple[int, int]) -> None:
    def reduced(world: Any) -> Any:
        shard = st.ShardedTensor.from_rank_offsets("w", torch.ones(2), replica_id=replica_ids[world.rank])
        return tree_norm({"w": shard}, world=world)

    with pytest.raises(IntegrityError, match=r"reduce_elements: the ranks do not hold each element .* once\n  'w'"):
        st.simulate(2, reduced)


def test_a_rank_that_leaves_out_the_others_gets_no_number() -> None:
    part = st.ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 0, 2))
    with pytest.raises(IntegrityError, match="Pass the world of all ranks"):
        tree_sum({"w": part}, world=st.world.one_process())
    assert tree_sum({"w": part.data}, world=st.world.one_process()) == 2


def test_ranks_with_other_orders_are_refused() -> None:
    tree = {"w": torch.ones(2)}
    with pytest.raises(WorldError, match="ord=1"):
        st.simulate(2, lambda world: tree_norm(tree, ord=1 + world.rank, world=world))


@pytest.mark.torchrun
@pytest.mark.slow
def test_ranks_of_torch_distributed() -> None:
    assert st.live.run_processes(2, norm_of_halves) == [5.0, 5.0]


def norm_of_halves(world: Any) -> float:
    half = torch.tensor([[3.0], [4.0]])[world.rank]
    return tree_norm({"w": st.ShardedTensor.from_rank_offsets("w", half, (0, world.rank, 2))})

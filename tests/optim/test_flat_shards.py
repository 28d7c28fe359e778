"""Slices of buffers as flat-range shards and back: the law, replicas on tensor-parallel ranks, factories, targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import shardtree
from shardtree.buffers import buffer_slices, flat_shards, flat_targets, plan_buffers, slice_views
from shardtree.core.lazy import LazyTensor, stored
from shardtree.layouts import AxisSplit, Mesh, PartitionSpec, from_local
from shardtree.mapping import ShardedTensor, ShardedTensorFactory
from shardtree.testing import (
    BufferOptions,
    buffer_options,
    check_flat_shards,
    glu,
    packed_slices,
    random_bits,
)
from tests.core.trees.samples import assert_caught

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.float8_e5m2, torch.bool])


def whole_tensors(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: random_bits(shape, dtype, seed) for seed, (name, shape) in enumerate(shapes.items())}


def check_shards(functions: dict[str, Callable[..., Any]], drawn: BufferOptions, dtype: torch.dtype) -> None:
    shapes, options = drawn
    check_flat_shards(plan_buffers(shapes, **options), whole_tensors(shapes, dtype), **functions)


@given(buffer_options(), DTYPES)
@example(({"p0": (), "p1": (0, 3), "p2": (2, 2)}, {"data_parallel": 8}), torch.float32)
def test_flat_shards_are_the_parameters_and_give_the_slices_again(drawn: BufferOptions, dtype: torch.dtype) -> None:
    check_shards({}, drawn, dtype)


def shards_with(change: Callable[[ShardedTensor], ShardedTensor]) -> Callable[..., Any]:
    def broken(*args: Any, **options: Any) -> Any:
        return {name: change(shard) for name, shard in flat_shards(*args, **options).items()}

    return broken


def from_the_front(shard: ShardedTensor) -> ShardedTensor:
    return replace(shard, flattened_range=slice(0, len(shard.data)))


def without_last(*args: Any, **options: Any) -> Any:
    return dict(list(flat_shards(*args, **options).items())[:-1])


@pytest.mark.parametrize("broken", [shards_with(from_the_front), without_last])
def test_the_law_catches_shards(broken: Callable[..., Any]) -> None:
    assert_caught(check_shards, {"shards": broken}, buffer_options(), DTYPES)


def shifted(plan: Any, rank: int, tree: Any, **options: Any) -> Any:
    return [part.roll(1) if part.dtype.itemsize > 1 else part for part in buffer_slices(plan, rank, tree, **options)]


def test_the_law_catches_slices() -> None:
    assert_caught(check_shards, {"slices": shifted}, buffer_options(), st.just(torch.float32))


def parameters(tensor: int, ranks: int, data: int) -> dict[str, Any]:
    """Return what rank (tensor, data) of a model holds: replica ids as Megatron-Core has them."""
    generator = torch.Generator().manual_seed(0)
    up, down, norm = (torch.randn(shape, generator=generator).bfloat16() for shape in ((12, 5), (5, 12), (5,)))
    halves = torch.cat([part.chunk(ranks)[tensor] for part in up.chunk(2)])
    cut = (1, tensor, ranks)
    return {
        "up": glu("up", halves, tensor, ranks, replica_id=(0, 0, data)),
        "down": ShardedTensor.from_rank_offsets("down", down.chunk(ranks, 1)[tensor], cut, replica_id=(0, 0, data)),
        "norm": ShardedTensor.from_rank_offsets("norm", norm, replica_id=(0, tensor, data)),
    }


def all_shards(ranks: int, data_parallel: int, **options: Any) -> list[Any]:
    trees = []
    for rank in range(ranks * data_parallel):
        tensor, data = rank % ranks, rank // ranks
        held = parameters(tensor, ranks, data)
        plan = plan_buffers(held, data_parallel=data_parallel, align=4)
        slices = [torch.ones(length) for length in plan.slice_lengths]
        trees.append(flat_shards(plan, data, slices, held, prefix="optimizer.state.exp_avg", **options))
    return trees


def problems(trees: list[Any]) -> tuple[shardtree.layouts.Problem, ...]:
    built = [shardtree.trees.extract_sharded(shardtree.apply_factories(tree))[0] for tree in trees]
    leaves = [[leaf for _, leaf in shardtree.trees.leaves_with_paths(tree)] for tree in built]
    return shardtree.layouts.sharding_problems(
        [shardtree.layouts.shard_columns(own, rank) for rank, own in enumerate(leaves)]
    )


@pytest.mark.parametrize(("ranks", "data_parallel"), [(1, 1), (1, 8), (2, 3), (3, 2), (2, 30)])
def test_all_ranks_main_replicas_tile_the_tensors(ranks: int, data_parallel: int) -> None:
    assert problems(all_shards(ranks, data_parallel)) == ()


def test_a_data_parallel_part_that_is_kept_is_a_problem() -> None:
    trees = all_shards(2, 3, replica_id=lambda replica: replica)
    assert problems(trees)


def test_a_moment_of_a_low_precision_parameter_has_its_own_dtype() -> None:
    held = parameters(0, 2, 1)
    plan = plan_buffers(held, data_parallel=2)
    found = flat_shards(plan, 1, [torch.ones(length) for length in plan.slice_lengths], held, prefix="exp_avg")
    assert {name: leaf.key for name, leaf in found.items()} == {"down": "exp_avg.down", "norm": "exp_avg.norm"}
    assert found["down"].dtype is torch.float32
    assert (found["down"].axis_fragmentations, found["down"].global_shape) == ((1, 2), (5, 12))


def test_a_factory_gets_the_range_and_the_key() -> None:
    held = parameters(1, 2, 0)
    plan = plan_buffers(held, data_parallel=2)
    [slices] = [[torch.arange(float(length)) for length in plan.slice_lengths]]
    found = flat_shards(plan, 0, slices, held, prefix="exp_avg")["up"]
    assert isinstance(found, ShardedTensorFactory)
    assert (found.key, found.flattened_range, found.replica_id) == ("exp_avg.up", slice(0, 30), (0, 0, 0))
    gate, up = found.build()
    assert (gate.key, gate.data.tolist()) == ("exp_avg.up", list(range(15)))
    assert (up.flattened_range, up.data.tolist()) == (slice(0, 15), list(range(15, 30)))


def test_a_part_of_several_boxes_has_no_flat_ranges() -> None:
    spec = PartitionSpec((AxisSplit("tp", split_factor=2),))
    held = from_local({"w": torch.zeros(4)}, Mesh(tp=2), spec, 1)
    flat = flat_shards(plan_buffers(held, data_parallel=2), 0, [torch.zeros(2)], held, replica_id=lambda replica: 0)
    with pytest.raises(shardtree.errors.ShapeError, match="'w': the rank holds several blocks of the tensor"):
        shardtree.apply_factories(flat)


def test_targets_are_shards_without_memory() -> None:
    held = parameters(0, 1, 0)
    plan = plan_buffers(held, data_parallel=3, bucket_size=50)
    for rank in range(3):
        slices = [torch.zeros(length) for length in plan.slice_lengths]
        shards = flat_shards(plan, rank, slices, held, prefix="exp_avg")
        targets = flat_targets(plan, rank, held, prefix="exp_avg")
        assert list(targets) == list(shards)
        assert all(target.data.is_meta for target in targets.values())
        for name, target in targets.items():
            assert target.without_data() == shards[name].without_data()
    assert flat_targets(plan, 0, held, dtype=torch.float16)["up"].data.dtype is torch.float16


def test_lazy_slices_stay_lazy() -> None:
    plan = plan_buffers({"w": (2, 3), "b": (3,)}, data_parallel=2)
    part = stored(lambda offset, shape: torch.arange(5)[offset[0] : offset[0] + shape[0]], (5,), torch.int64, name="x")
    views = slice_views(plan, 1, [part])
    assert isinstance(views["b"], LazyTensor)
    assert views["b"].read().tolist() == [1, 2, 3]


def test_views_write_through_and_new_slices_do_not() -> None:
    plan = plan_buffers({"w": (2, 3), "b": (3,)}, data_parallel=2)
    own = [torch.zeros(5)]
    views = slice_views(plan, 0, own)
    views["w"].fill_(7)
    assert own[0].tolist() == [7.0] * 5
    new = buffer_slices(plan, 0, views)
    new[0].zero_()
    assert own[0].tolist() == [7.0] * 5


def test_shards_with_data_are_joined_as_tensors_are() -> None:
    held = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3))}
    plan = plan_buffers(held, data_parallel=4)
    shards = flat_shards(plan, 1, [torch.tensor([3.0, 4.0])], held)
    assert torch.equal(buffer_slices(plan, 1, shards)[0], torch.tensor([3.0, 4.0]))
    assert buffer_slices(plan, 3, {}, dtype=torch.float16)[0].dtype is torch.float16


def test_the_reference_packs_what_the_law_compares() -> None:
    tensors = {"w": torch.tensor([[1, 2], [3, 4]]), "b": torch.tensor([5])}
    plan = plan_buffers(tensors, data_parallel=2, align=3, order=["b", "w"])
    assert [part.tolist() for [part] in packed_slices(plan, tensors)] == [[5, 0, 0, 1], [2, 3, 4, 0]]

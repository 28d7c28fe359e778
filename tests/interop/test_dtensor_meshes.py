"""Tensors on sub-meshes of any kind: unflattened, flattened or joined from one world, several kinds in one tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as some
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, debug, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardtree as st
from shardtree.core.layouts import tensor_shards, tree_columns
from shardtree.errors import MetadataError
from shardtree.interop.dtensor import dtensor_layout, from_dtensors
from shardtree.interop.dtensor._placed import widened
from shardtree.layouts import Mesh
from shardtree.storage import MemoryStorage
from shardtree.trees import leaves_with_paths
from tests.core.trees.samples import assert_caught
from tests.interop.dtensor_cases import numbered

RANKS = 8
unflattens = pytest.mark.skipif(not hasattr(DeviceMesh, "_unflatten"), reason="this torch has no DeviceMesh._unflatten")


@contextmanager
def world_of(rank: int) -> Iterator[DeviceMesh]:
    """Be one of eight ranks, whose collectives send nothing, and give the mesh of all of them."""
    dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (RANKS,), mesh_dim_names=("world",))
    finally:
        dist.destroy_process_group()
        # What torch remembers of a mesh's tensors is this rank's: no process of a job is two ranks, as this one is.
        debug._clear_sharding_prop_cache()


def cut(name: str, mesh: DeviceMesh, *placements: Any, shape: tuple[int, ...] = (16, 4)) -> dict[str, Any]:
    return {name: distribute_tensor(numbered(shape), mesh, placements, src_data_rank=None)}


def under_fsdp2(name: str, mesh: DeviceMesh, tensor: torch.Tensor) -> dict[str, Any]:
    """Return a parameter as fully_shard cuts it, which may be cut by tensor parallelism already."""
    module = torch.nn.Module()
    module.register_parameter(name, torch.nn.Parameter(tensor))
    return fully_shard(module, mesh=mesh).state_dict()


Tree = dict[str, Any]


def one_axis(world: DeviceMesh) -> tuple[Tree, DeviceMesh | None]:
    dense = world._unflatten(0, (4, 2), ("fsdp", "tp"))
    tree = cut("a", dense["fsdp"], Shard(0)) | cut("b", dense["tp"], Shard(1))
    return tree | cut("c", dense, Shard(1), Shard(0)), None


def dense_and_sparse(world: DeviceMesh) -> tuple[Tree, DeviceMesh | None]:
    dense = world._unflatten(0, (4, 2), ("fsdp", "tp"))
    sparse = world._unflatten(0, (2, 4), ("efsdp", "ep"))
    experts = cut("experts", sparse["ep"], Shard(0))["experts"]
    tree = under_fsdp2("norm", dense["fsdp"], numbered((12,))) | under_fsdp2("experts", sparse["efsdp"], experts)
    return tree | cut("router", world._unflatten(0, (2, 2, 2), ("a", "b", "c"))["b"], Shard(0)), None


def stage(world: DeviceMesh) -> tuple[Tree, DeviceMesh | None]:
    dense = world._unflatten(0, (2, 2, 2), ("pp", "fsdp", "tp"))
    sparse = world._unflatten(0, (2, 1, 4), ("pp", "efsdp", "ep"))
    number = dense.get_local_rank("pp")
    tree = cut(f"layers.{number}", dense["fsdp"], Shard(0)) | cut(f"experts.{number}", sparse["ep"], Shard(0))
    return tree, dense["fsdp", "tp"]


def hsdp_beside_tp(world: DeviceMesh) -> tuple[Tree, DeviceMesh | None]:
    dense = world._unflatten(0, (2, 2, 2), ("replicate", "fsdp", "tp"))
    rows, columns = cut("w", dense["tp"], Shard(0))["w"], cut("w", dense["tp"], Shard(1))["w"]
    data = dense["replicate", "fsdp"]
    tree = under_fsdp2("rows", data, rows) | under_fsdp2("columns", data, columns)
    return tree | cut("norm", data, Replicate(), Shard(0)), None


def flattened(world: DeviceMesh) -> tuple[Tree, DeviceMesh | None]:
    dense = world._unflatten(0, (2, 2, 2), ("dp", "cp", "tp"))
    tree = cut("near", dense["dp", "cp"]._flatten("loss"), Shard(0))
    return tree | cut("far", dense["dp", "tp"]._flatten("both"), Shard(0)), None


@pytest.mark.slow
@unflattens
@pytest.mark.peers
@pytest.mark.parametrize("make", [one_axis, dense_and_sparse, stage, hsdp_beside_tp, flattened])
def test_slices_of_unflattened_meshes_are_saved_whole(
    make: Callable[[DeviceMesh], tuple[Tree, DeviceMesh | None]],
) -> None:
    made = []
    for rank in range(RANKS):
        with world_of(rank) as world:
            tree, within = make(world)
            # A stage knows what its own ranks hold; a layout is of all that are saved together.
            layout = dtensor_layout(tree) if within is None else None
            made.append((from_dtensors(tree, within=within), layout))
    assert st.core.layouts.access_problems(tree_columns({rank: tree for rank, (tree, _) in enumerate(made)})) == ()

    def save_own(world: st.World) -> None:
        tree, layout = made[world.rank]
        st.save(tree, folder, world=world, layout=layout)

    folder = MemoryStorage()
    st.simulate(RANKS, save_own)
    stored = st.load_plain_tensors(folder)
    assert stored.keys() == {shard.key for tree, _ in made for shard in tensor_shards(tree)}
    for tensor in stored.values():
        assert tensor.equal(numbered(tensor.shape))

    def load_own(world: st.World) -> None:
        tree, layout = made[world.rank]
        loaded = st.load(st.trees.without_data(tree), folder, world=world, layout=layout)
        parts = [leaf for _, leaf in leaves_with_paths(loaded)]
        assert [part.tolist() for part in parts] == [shard.data.tolist() for shard in tensor_shards(tree)]

    st.simulate(RANKS, load_own)


# The law: a slice is any axes, in any order, of any grid over the outer mesh's ranks


@some.composite
def slices(draw: some.DrawFn) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return a grid of ranks, as an outer mesh counts them, and which of its axes a slice has."""
    sizes = draw(some.lists(some.integers(1, 4), min_size=1, max_size=4))
    axes = draw(some.permutations(range(len(sizes))))[: draw(some.integers(1, len(sizes)))]
    ranks = draw(some.permutations(range(prod(sizes))))
    return torch.tensor(ranks).view(sizes), tuple(axes)


def check_widened(widen: Callable[[Mesh, Mesh], Mesh], drawn: tuple[torch.Tensor, tuple[int, ...]]) -> None:
    """Check that each rank finds the same mesh, with each rank once, and itself where its own slice has it."""
    grid, axes = drawn
    outer = Mesh(world=grid.numel()).on_ranks(grid.flatten().tolist())
    others = [axis for axis in range(grid.ndim) if axis not in axes]
    parallel = grid.permute(*others, *axes).reshape(-1, *(grid.shape[axis] for axis in axes))
    own = [
        Mesh(**{f"axis{axis}": grid.shape[axis] for axis in axes}).on_ranks(ranks.flatten().tolist())
        for ranks in parallel
    ]
    (mesh,) = {widen(each, outer) for each in own}
    assert sorted(mesh.ranks) == sorted(outer.ranks)
    for each in own:
        for rank in each.ranks:
            assert each.coordinates(rank).items() <= mesh.coordinates(rank).items()


@given(slices())
def test_a_slice_of_any_axes_is_widened_to_all_ranks(drawn: tuple[torch.Tensor, tuple[int, ...]]) -> None:
    check_widened(widened, drawn)


def in_sorted_order(own: Mesh, outer: Mesh) -> Mesh:
    """The planted fault: a slice's ranks, taken to ascend."""
    return widened(own.on_ranks(sorted(own.ranks)), outer)


def test_the_law_of_slices_catches_ranks_that_are_sorted() -> None:
    assert_caught(check_widened, in_sorted_order, slices())


@pytest.mark.parametrize(
    ("ranks", "outer"),
    [
        ([1, 2], Mesh(world=4)),  # the steps of a slice, from a place where none begins
        ([0, 1, 2], Mesh(world=8)),  # ranks would be left over
        ([0, 3], Mesh(dp=2, tp=2)),
        ([0, 1, 3, 4], Mesh(world=8)),
        ([0, 8], Mesh(world=8)),
    ],
)
def test_ranks_without_parallel_ones_are_refused(ranks: list[int], outer: Mesh) -> None:
    with pytest.raises(MetadataError, match="is not a slice"):
        widened(Mesh(fsdp=len(ranks)).on_ranks(ranks), outer)

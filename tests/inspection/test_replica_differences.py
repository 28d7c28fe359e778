"""check_replicas: who differs from whom, where first, how much; of live ranks, before a save, and of ranks' files."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import IntegrityError
from shardtree.inspection._replicas import ReplicaDifference
from shardtree.storage import MemoryStorage
from shardtree.testing import random_bits
from tests.core.trees.samples import assert_caught
from tests.options import save_keywords

SPECS = [(), ("dp",), (None, "tp"), ("tp", "dp"), (("dp", "tp"),)]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.complex64, torch.bool]
Check = Callable[[list[Any]], list[tuple[ReplicaDifference, ...]]]


def save_all(trees: list[Any], folder: MemoryStorage, save: Callable[..., Any] = st.save, **options: Any) -> None:
    how = save_keywords(**options)
    st.simulate(len(trees), lambda world: save(trees[world.rank], folder, world=world, **how))


def checked(trees: list[Any]) -> list[tuple[ReplicaDifference, ...]]:
    return st.simulate(len(trees), lambda world: st.check_replicas(trees[world.rank], world=world))


@some.composite
def changes(draw: some.DrawFn) -> tuple[st.Mesh, st.PartitionSpec, torch.dtype, dict[int, int]]:
    """Draw a mesh, a spec, a dtype, and on some ranks how many of the first elements change."""
    mesh = st.Mesh(dp=draw(some.integers(1, 3)), tp=draw(some.integers(1, 3)))
    ranks = draw(some.dictionaries(some.integers(0, mesh.size - 1), some.integers(1, 4), max_size=3))
    return mesh, st.PartitionSpec(*draw(some.sampled_from(SPECS))), draw(some.sampled_from(DTYPES)), ranks


def says_who_differs(check: Check, drawn: Any, save: Callable[..., Any] = st.save) -> None:
    """Raise unless groups, counts and places are those of comparing whole tensors, and a save is refused there."""
    mesh, spec, dtype, changed = drawn
    whole = torch.zeros(8, 6, dtype=torch.uint8).bool() if dtype is torch.bool else random_bits((8, 6), dtype, 1)
    trees = [st.map_data(torch.clone, tree) for tree in st.shard({"w": whole}, mesh, spec)]
    for rank, count in changed.items():
        data = trees[rank]["w"].data
        flat = data.view(-1).view(torch.uint8)
        flat[: count * data.itemsize : data.itemsize] ^= 1
    held: dict[tuple[int, ...], dict[bytes, list[int]]] = {}
    first: dict[tuple[int, ...], bytes] = {}
    for rank, tree in enumerate(trees):
        shard = tree["w"]
        if shard.data.numel():
            place = (*shard.global_offset, *shard.local_shape)
            bits = shard.data.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            held.setdefault(place, {}).setdefault(bits, []).append(rank)
            if st.is_main_replica(shard.replica_id):
                first[place] = bits
    expected = set()
    for place, groups in held.items():
        for bits, ranks in groups.items():
            if bits != first[place]:
                main, size = first[place], dtype.itemsize
                unlike = [at for at in range(len(bits) // size) if bits[at * size :][:size] != main[at * size :][:size]]
                index = (place[0] + unlike[0] // place[3], place[1] + unlike[0] % place[3])
                expected.add((tuple(ranks), tuple(groups[main]), len(unlike), index))
    for found in check(trees):
        told = {(each.holders, each.than, each.values.count, each.values.first) for each in found if each.values}
        assert told == expected and len(found) == len(expected)
    folder = MemoryStorage()
    try:
        save_all(trees, folder, save=save, check_replicas=True)
        refused = False
    except IntegrityError as error:
        refused = "'w': rank" in str(error)
    assert refused is bool(expected) and bool(folder.names()) is not refused


@pytest.mark.slow
@given(changes())
def test_what_differs_is_told_with_all_ranks_and_nothing_else(drawn: Any) -> None:
    says_who_differs(checked, drawn)


def test_the_law_catches_a_check_that_sees_every_second_rank_alone() -> None:
    def careless(trees: list[Any]) -> Any:
        return [tuple(each for each in found if 1 not in each.holders) for found in checked(trees)]

    assert_caught(says_who_differs, careless, changes())


def test_the_law_catches_a_save_that_takes_replicas_on_trust() -> None:
    def trusting(tree: Any, folder: Any, *, world: st.World, **options: Any) -> None:
        st.save(tree, folder, world=world)

    assert_caught(lambda save, drawn: says_who_differs(checked, drawn, save), trusting, changes())


def test_flat_shards_signed_zeros_and_nans() -> None:
    def on_rank(world: st.World) -> Any:
        data = torch.tensor([1.0, float("nan"), 0.0]) if world.rank == 0 else torch.tensor([1.0, 2.0, -0.0])
        shard = st.ShardedTensor(
            "w", data, torch.float32, (2, 3), (4, 3), (2, 0), (2, 1), world.rank, flattened_range=slice(2, 5)
        )
        return st.check_replicas([shard], world=world)

    (found,) = st.simulate(2, on_rank)[1]
    assert found.values is not None
    assert (found.box, found.values.first, found.values.count) == ("elements [2:5] of [2:4, 0:3]", (3, 0), 2)
    assert (found.values.ulps, found.values.largest) == (0, 0.0)


@pytest.mark.parametrize(
    "options",
    [{}, {"validate_access_integrity": False}, {"sharded_strategy": ("torch_dist", 1)}, {"async_sharded_save": True}],
    ids=str,
)
def test_a_save_of_a_spec_that_forgets_a_cut_tells_the_same(options: dict[str, Any]) -> None:
    halves = torch.arange(48.0).reshape(8, 6).chunk(2)
    trees = [[st.ShardedTensor.from_rank_offsets("w", half, replica_id=rank)] for rank, half in enumerate(halves)]
    folder = MemoryStorage()
    with pytest.raises(IntegrityError, match="'w': rank 1 holds other elements than rank 0") as caught:
        save_all(trees, folder, check_replicas=True, **options)
    (found,) = checked(trees)[0]
    assert str(found) in str(caught.value) and folder.names() == ()


@pytest.mark.parametrize("changed", [False, True])
def test_with_a_known_layout_each_shard_is_compared_with_its_own_replica(changed: bool) -> None:
    state = {name: torch.full((4, 2), float(number)) for number, name in enumerate("zyxw")}
    trees = [st.map_data(torch.clone, tree) for tree in st.shard(state, st.Mesh(dp=2, tp=2), st.P("tp"))]
    layout = st.core.layouts.tree_columns(trees)
    if changed:
        trees[3]["x"].data[0, 0] = float("nan")
    refused = pytest.raises(IntegrityError, match="'x': rank 3 holds other elements than rank 1")
    with refused if changed else nullcontext():
        save_all(trees, MemoryStorage(), check_replicas=True, layout=layout)

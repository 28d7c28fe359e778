"""save(check_replicas=True): replicas that differ are found before anything is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardtree
from shardtree.errors import IntegrityError
from shardtree.storage import MemoryStorage
from tests.options import save_keywords
from tests.trees.samples import assert_caught

WHOLE = torch.arange(48.0).reshape(8, 6)


SPECS = [(), ("dp",), (None, "tp"), ("tp", "dp"), (("dp", "tp"),)]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[shardtree.Mesh, shardtree.PartitionSpec, int, bool]:
    """Draw a mesh, a spec, a rank of whose elements one may be changed, and whether it is."""
    mesh = shardtree.Mesh(dp=draw(st.integers(1, 3)), tp=draw(st.integers(1, 3)))
    spec = shardtree.PartitionSpec(*draw(st.sampled_from(SPECS)))
    return mesh, spec, draw(st.integers(0, mesh.size - 1)), draw(st.booleans())


def save_all(trees: list[Any], folder: MemoryStorage, **options: Any) -> None:
    shardtree.simulate(
        len(trees), lambda world: shardtree.save(trees[world.rank], folder, world=world, **save_keywords(**options))
    )


def raises_for_differing_replicas(save: Any, drawn: Any, **options: Any) -> None:
    mesh, spec, rank, changes = drawn
    trees = shardtree.shard({"w": WHOLE}, mesh, spec)
    trees = [shardtree.map_data(torch.clone, tree) for tree in trees]
    mine = trees[rank]["w"]
    if changes:
        mine.data.view(torch.int32)[:1, :1] ^= 1  # nothing, where the rank has no elements
    is_shared = mine.data.numel() and sum(tree["w"].global_offset == mine.global_offset for tree in trees) > 1
    folder = MemoryStorage()
    try:
        save(trees, folder, **options)
    except IntegrityError as error:
        assert changes and is_shared and "'w': rank" in str(error) and folder.names() == ()
    else:
        assert not (changes and is_shared)


@pytest.mark.slow
@given(layouts())
def test_it_raises_where_replicas_differ_and_nowhere_else(drawn: Any) -> None:
    raises_for_differing_replicas(lambda *ends: save_all(*ends, check_replicas=True), drawn)


def test_the_law_of_replicas_catches_a_save_that_takes_them_on_trust() -> None:
    assert_caught(raises_for_differing_replicas, save_all, layouts())


@pytest.mark.parametrize(
    "options",
    [{}, {"validate_access_integrity": False}, {"sharded_strategy": ("torch_dist", 1)}, {"async_sharded_save": True}],
    ids=str,
)
def test_a_spec_that_forgets_a_cut_is_found(options: dict[str, Any]) -> None:
    shards = [
        shardtree.ShardedTensor.from_rank_offsets("w", half, replica_id=rank)
        for rank, half in enumerate(WHOLE.chunk(2))
    ]
    folder = MemoryStorage()
    with pytest.raises(IntegrityError, match="'w': rank 1 holds other elements than rank 0"):
        save_all([{"w": shard} for shard in shards], folder, check_replicas=True, **options)
    assert folder.names() == ()


@pytest.mark.parametrize("changed", [False, True])
def test_with_a_known_layout_each_shard_is_compared_with_its_own_replica(changed: bool) -> None:
    mesh = shardtree.Mesh(dp=2, tp=2)
    state = {name: torch.full((4, 2), float(number)) for number, name in enumerate("zyxw")}
    trees = [
        shardtree.map_data(torch.clone, tree) for tree in shardtree.shard(state, mesh, shardtree.PartitionSpec("tp"))
    ]
    layout = shardtree.layouts.tree_columns(trees)
    if changed:
        trees[3]["x"].data[0, 0] = float("nan")
    try:
        save_all(trees, MemoryStorage(), check_replicas=True, layout=layout)
    except IntegrityError as error:
        assert changed and "'x': rank 3 holds other elements than rank 1" in str(error)
    else:
        assert not changed

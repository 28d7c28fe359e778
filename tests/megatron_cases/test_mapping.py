"""Leaves: what test_mapping says of shards, flat shards, factories and replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import shardtree as st
from shardtree.errors import MetadataError, ShapeError

CUTS = ((0, 0, 10), (2, 3, 6))
SHAPE = (1, 3, 7, 9)


def flat() -> st.ShardedTensor:
    data = torch.arange(28).reshape(4, 7).flatten()[4:9]
    return st.ShardedTensor.from_rank_offsets_flat("k", data, (4, 7), (0, 1, 2), (1, 3, 5), flattened_range=slice(4, 9))


def test_rank_offsets_give_global_shape_offset_and_grid() -> None:
    shard = st.ShardedTensor.from_rank_offsets("k", torch.ones(SHAPE), *CUTS)
    assert (shard.local_shape, shard.dtype) == (SHAPE, torch.float32)
    assert (shard.global_shape, shard.global_offset) == ((10, 3, 42, 9), (0, 0, 21, 0))
    assert shard.axis_fragmentations == (10, 1, 6, 1)


def test_a_flat_shard_has_the_place_of_its_box() -> None:
    data = torch.arange(28.0).reshape(1, 4, 7).flatten()[4:9]
    shard = st.ShardedTensor.from_rank_offsets_flat(
        "k", data, (1, 4, 7), (1, 0, 2), (2, 3, 5), flattened_range=slice(4, 9)
    )
    assert (shard.local_shape, shard.global_shape) == ((1, 4, 7), (1, 8, 35))
    assert (shard.global_offset, shard.axis_fragmentations) == ((0, 0, 21), (1, 2, 5))
    assert shard.data.tolist() == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("field", [{"local_shape": (1, 2, 7, 9)}, {"global_offset": (0, 1, 0)}], ids=str)
def test_broken_metadata_is_refused_as_soon_as_it_is_built_where_theirs_waits_for_a_check(field: dict) -> None:
    shard = st.ShardedTensor.from_rank_offsets("k", torch.ones(SHAPE, device="meta"), *CUTS)
    with pytest.raises((MetadataError, ShapeError), match=next(iter(field))):
        replace(shard, **field)


def test_a_flat_range_wants_flat_data_of_its_length() -> None:
    with pytest.raises((MetadataError, ShapeError)):
        st.ShardedTensor.from_rank_offsets_flat("k", torch.ones(SHAPE), SHAPE, *CUTS, flattened_range=slice(4, 9))
    with pytest.raises((MetadataError, ShapeError), match="local_shape"):
        replace(flat(), local_shape=(5,))


@pytest.mark.parametrize(
    ("narrow", "local", "whole", "offset"),
    [((1, 1, 2), (1, 2, 7, 9), (10, 2, 42, 9), (0, 0, 21, 0)), ((2, 3, 2), (1, 3, 2, 9), (10, 3, 12, 9), (0, 0, 6, 0))],
)
def test_narrowing_narrows_every_ranks_box_alike(narrow: tuple, local: tuple, whole: tuple, offset: tuple) -> None:
    (part,) = st.ShardedTensor.from_rank_offsets("k", torch.ones(SHAPE), *CUTS).narrow(*narrow)
    assert (part.local_shape, part.global_shape, part.global_offset) == (local, whole, offset)


def test_a_narrowed_flat_shard_keeps_the_elements_in_the_box() -> None:
    (first,) = flat().narrow(0, 0, 1)
    assert (first.data.tolist(), first.local_shape, first.global_offset) == ([4, 5, 6], (1, 7), (1, 21))
    (three,) = flat().narrow(0, 0, 3)
    assert (three.data.tolist(), three.global_shape, three.global_offset) == ([4, 5, 6, 7, 8], (6, 35), (3, 21))
    assert flat().narrow(0, 2, 1) == []


def test_a_factory_builds_a_tree_and_merges_what_is_loaded_without_changing_the_first_tree() -> None:
    def build(key: str, tensor: torch.Tensor, replica_id: st.ReplicaId, flattened_range: slice | None) -> dict:
        return {
            name: st.ShardedTensor.from_rank_offsets(key + name, tensor + more, replica_id=replica_id)
            for name, more in (("a", 1), ("b", 2))
        }

    tree = {"level": st.ShardedTensorFactory("k", torch.arange(3), build, lambda parts: parts["b"])}
    built = st.apply_factories(tree)
    assert [built["level"][name].data.tolist() for name in "ab"] == [[1, 2, 3], [2, 3, 4]]
    assert isinstance(tree["level"], st.ShardedTensorFactory)
    parts = st.map_shards(lambda shard: shard.data, built)
    assert st.apply_factory_merges(parts, tree)["level"].tolist() == [2, 3, 4]


@pytest.mark.parametrize("replica", [0, (0,), (0, 0)])
def test_all_zeros_are_the_main_replica(replica: st.ReplicaId) -> None:
    assert st.is_main_replica(replica)


@pytest.mark.parametrize("replica", [1, 2, (1,), (1, 0), (1, 1, 1)])
def test_any_other_number_is_another_replica(replica: st.ReplicaId) -> None:
    assert not st.is_main_replica(replica)

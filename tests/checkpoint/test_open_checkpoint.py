"""An open checkpoint is a mapping of lazy shards: trees compose over it, and only asked-for bytes are read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import shardtree as st
from shardtree.errors import KeyMismatch
from shardtree.storage import MemoryStorage
from shardtree.testing import transposed
from tests.checkpoint.parts import noting

W = torch.arange(1024 * 64, dtype=torch.float32).view(1024, 64)


def saved():
    folder, count = MemoryStorage(), []

    def save(world):
        rows = W.chunk(4)[world.rank]
        tree = {
            "decoder.weight": st.ShardedTensor.from_rank_offsets("decoder.weight", rows, (0, world.rank, 4)),
            "decoder.bias": st.ShardedTensor.from_rank_offsets("decoder.bias", torch.arange(3), replica_id=world.rank),
            "rng": st.ShardedObject("rng", {"rank": world.rank}, (4,), (world.rank,)),
            "step": 7,
        }
        st.save(tree, folder, world=world)

    st.simulate(4, save)
    watched = noting(folder, lambda name, begin, end: count.append((end - begin) * ("-of-" in name)))
    watched.count = count
    return watched


def test_it_is_a_read_only_mapping_by_key():
    opened = st.open_checkpoint(saved())
    assert list(opened) == ["decoder.bias", "decoder.weight", *(f"rng/shard_{rank}_4" for rank in range(4))]
    assert len(opened) == 6 and "decoder.bias" in opened and "nothing" not in opened
    assert "6 keys" in repr(opened)
    assert opened.common() == {"step": 7}
    shard = opened["decoder.weight"]
    assert (shard.global_shape, shard.dtype, shard.replica_id) == ((1024, 64), torch.float32, 0)
    assert isinstance(shard.data, st.LazyTensor)
    assert opened["rng/shard_2_4"].data == {"rank": 2}
    with pytest.raises(KeyMismatch, match="'nothing'"):
        opened["nothing"]
    with pytest.raises(TypeError):
        opened["decoder.bias"] = shard


def test_nothing_is_read_until_it_is_asked_for():
    folder = saved()
    opened = st.open_checkpoint(folder, options=st.LoadOptions(verify=None))
    tree = {key: opened[key] for key in ("decoder.weight", "decoder.bias")}
    assert set(st.extract_metadata(tree)) == set(tree)
    assert sum(folder.count) == 0


@pytest.mark.parametrize(
    ("pick", "most"),
    [
        (lambda w: w[0:10, :], 10 * 64 * 4),
        (lambda w: w[1000], 64 * 4),
        (lambda w: w[255:257], 2 * 64 * 4),
        (lambda w: w[5, 7], 4),
        (lambda w: w[0:0], 0),
        (lambda w: w.narrow(0, 300, 20).to(torch.float64), 20 * 64 * 4),
        (lambda w: torch.cat([w[:2], w[-2:]]), 4 * 64 * 4),
        (lambda w: w[3:5].transpose(0, 1), 2 * 64 * 4),
        (lambda w: w.chunk(4)[1], 256 * 64 * 4),
    ],
)
def test_only_the_asked_for_bytes_are_read(pick, most):
    folder = saved()
    lazy = pick(st.open_checkpoint(folder, options=st.LoadOptions(verify=None))["decoder.weight"].data)
    assert sum(folder.count) == 0
    assert torch.equal(lazy.read(), pick(W))
    assert sum(folder.count) == most


def test_verify_all_widens_reads_to_blocks():
    folder = saved()
    assert torch.equal(
        st.open_checkpoint(folder, options=st.LoadOptions(verify="all"))["decoder.weight"].data[0:10].read(), W[:10]
    )
    assert sum(folder.count) > 10 * 64 * 4


def test_tree_maps_and_factories_compose_over_it_before_anything_is_read():
    folder = saved()
    opened = st.open_checkpoint(folder, options=st.LoadOptions(verify=None))
    halved = st.map_shards(
        lambda leaf: replace(leaf, data=leaf.data[:8], **EIGHT_ROWS), {"w": opened["decoder.weight"]}
    )
    tree = st.cast(st.prefix(halved, "new."), torch.bfloat16)
    tree["t"] = transposed("t", tree["w"].data)
    built = st.apply_factories(tree)
    assert built["t"].global_shape == (64, 8) and built["w"].key == "new.decoder.weight" and sum(folder.count) == 0
    other = MemoryStorage()
    st.save(tree, other)
    plain = st.load_plain_tensors(other)
    assert torch.equal(plain["new.decoder.weight"], W[:8].bfloat16()) and torch.equal(plain["t"], W[:8].bfloat16().t())
    assert sum(folder.count) == 2 * 8 * 64 * 4


EIGHT_ROWS = {"local_shape": (8, 64), "global_shape": (8, 64)}


def test_an_open_checkpoint_can_be_saved_elsewhere():
    opened = st.open_checkpoint(saved())
    other = MemoryStorage()
    st.save({key: opened[key] for key in opened} | opened.common(), other)
    plain = st.load_plain_tensors(other, options=st.LoadOptions(verify="all"))
    assert torch.equal(plain["decoder.weight"], W) and plain["decoder.bias"].tolist() == [0, 1, 2]
    assert st.load_common_state_dict(other) == {"step": 7}
    assert st.open_checkpoint(other)["rng/shard_3_4"].data == {"rank": 3}


def test_its_values_are_targets_of_a_load():
    folder = saved()
    opened = st.open_checkpoint(folder)
    loaded = st.load(
        {"w": opened["decoder.weight"], "r": opened["rng/shard_1_4"]}, folder, validate_access_integrity=False
    )
    assert torch.equal(loaded["w"], W) and loaded["r"] == {"rank": 1}


def test_nested_takes_keys_apart():
    opened = st.open_checkpoint(saved())
    tree = opened.nested()
    assert set(tree) == {"decoder", *(f"rng/shard_{rank}_4" for rank in range(4))}
    assert tree["decoder"]["bias"].data.read().tolist() == [0, 1, 2]
    by_slash = opened.nested("/")
    assert by_slash["rng"]["shard_0_4"].data == {"rank": 0} and "decoder.bias" in by_slash


def test_what_is_listed_agrees():
    folder = saved()
    tensors, everything = st.load_tensors_metadata(folder), st.load_sharded_metadata(folder)
    assert set(tensors) == {"decoder.weight", "decoder.bias"} and set(everything) == set(st.open_checkpoint(folder))
    assert all(shard.data is None for shard in everything.values())
    assert tensors["decoder.weight"].global_shape == (1024, 64)

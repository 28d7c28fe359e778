"""Removing tensors from a checkpoint: a new index first, so that every moment has a checkpoint that loads."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

import shardtree as st
from shardtree.errors import CheckpointReplaced, KeyMismatch
from shardtree.storage import MemoryStorage
from shardtree.testing import watched

KEYS = ("model.w", "model.v", "optimizer.w", "optimizer.v")


class Killed(BaseException):
    pass


def shard(key, rank, ranks):
    value = KEYS.index(key) if key in KEYS else 9
    return st.ShardedTensor.from_rank_offsets(key, torch.full((2,), value), (0, rank, ranks))


def tree(rank, ranks):
    mine = [key for number, key in enumerate(KEYS) if key.startswith("model") or number % ranks == rank]
    shards = {key: shard(key, rank, ranks) if key.startswith("model") else shard(key, 0, 1) for key in mine}
    return shards | {"o": st.ShardedObject("optimizer.rng", rank, (ranks,), (rank,)), "step": 4}


def saved():
    folder = MemoryStorage()
    st.simulate(2, lambda world: st.save(tree(world.rank, 2), folder, world=world))
    return folder


def files(folder):
    return sorted(f"{save}/{name}" for save in folder.names() for name in folder.names(save))


def assert_loads(folder):
    """Every key that is listed can be read and has its elements, and the model is complete."""
    plain = st.load_plain_tensors(folder, options=st.LoadOptions(verify="all"))
    assert {"model.w", "model.v"} <= set(plain)
    for key, tensor in plain.items():
        assert set(tensor.tolist()) == {KEYS.index(key)}
    opened = st.open_checkpoint(folder)
    assert [opened[key].data for key in opened if "rng" in key] in ([0, 1], [])
    assert st.load_common_state_dict(folder)["step"] == 4
    return set(plain)


def test_what_begins_with_the_prefix_goes_and_the_rest_stays():
    folder = saved()
    st.remove_sharded_tensors(folder, "optimizer.")
    assert assert_loads(folder) == {"model.w", "model.v"}
    assert list(st.open_checkpoint(folder)) == ["model.v", "model.w"]
    with pytest.raises(KeyMismatch, match=r"optimizer\.w"):
        st.load({"w": shard("optimizer.w", 0, 1)}, folder)


def test_files_that_nothing_refers_to_are_deleted():
    folder = MemoryStorage()
    own = {0: "model.w", 1: "optimizer.w"}
    st.simulate(2, lambda world: st.save({"s": shard(own[world.rank], 0, 1)}, folder, world=world))
    st.remove_sharded_tensors(folder, "optimizer.")
    names = [name.rpartition("/")[2] for name in files(folder)]
    assert names == ["00000-of-00002.safetensors", "common.safetensors", "index-1.safetensors"]
    assert st.load_plain_tensors(folder)["model.w"].tolist() == [0, 0]


def test_a_prefix_that_nothing_begins_with_changes_nothing():
    folder = saved()
    before = {name: folder.read(name) for name in [*files(folder), "metadata.json"]}
    st.remove_sharded_tensors(folder, "nothing")
    assert {name: folder.read(name) for name in [*files(folder), "metadata.json"]} == before


def test_removing_twice_and_everything():
    folder = saved()
    st.remove_sharded_tensors(folder, "optimizer.w")
    st.remove_sharded_tensors(folder, "optimizer.v")
    assert assert_loads(folder) == {"model.w", "model.v"}
    st.remove_sharded_tensors(folder, "")
    assert st.load_plain_tensors(folder) == {}
    assert [name.rpartition("/")[2] for name in files(folder)] == ["common.safetensors", "index-3.safetensors"]


def test_a_removed_checkpoint_can_be_overwritten():
    folder = saved()
    st.remove_sharded_tensors(folder, "optimizer.")
    st.simulate(2, lambda world: st.save(tree(world.rank, 2), folder, overwrite=True, world=world))
    assert assert_loads(folder) == set(KEYS)
    assert len([name for name in folder.names() if name.startswith("save-")]) == 1


def kill_before(step, calls):
    def before(call):
        calls.append(call)
        if call.number == step:
            raise Killed

    return before


def check_kill(remove, step):
    """Raise unless a removal that dies before a step leaves what loads, and the next removal ends well."""
    folder, calls = saved(), []
    with suppress(Killed):
        remove(watched(folder, before=kill_before(step, calls)), "optimizer.")
    assert assert_loads(folder) in (set(KEYS), {"model.w", "model.v"})
    st.remove_sharded_tensors(folder, "optimizer.")
    assert assert_loads(folder) == {"model.w", "model.v"}
    return len(calls) > step


def test_a_removal_that_dies_at_any_step_leaves_a_checkpoint():
    steps = 0
    while check_kill(st.remove_sharded_tensors, steps):
        steps += 1
    assert steps > 8


def test_the_check_of_kills_sees_files_that_are_deleted_too_early():
    def deletes_first(storage, prefix):
        save = next(name for name in storage.names() if name.startswith("save-"))
        storage.remove(f"{save}/00001-of-00002.safetensors")
        st.remove_sharded_tensors(storage, prefix)

    with pytest.raises((AssertionError, st.CheckpointingException)):
        all(check_kill(deletes_first, step) for step in range(8))


def test_an_open_checkpoint_whose_file_was_removed_says_so():
    folder = MemoryStorage()
    own = {0: "model.w", 1: "optimizer.w"}
    st.simulate(2, lambda world: st.save({"s": shard(own[world.rank], 0, 1)}, folder, world=world))
    opened = st.open_checkpoint(folder)
    st.remove_sharded_tensors(folder, "optimizer.")
    with pytest.raises(CheckpointReplaced):
        opened["optimizer.w"].data.read()
    assert opened["model.w"].data.read().tolist() == [0, 0]


def test_removal_is_done_once_by_a_world():
    folder = saved()
    st.simulate(3, lambda world: st.remove_sharded_tensors(folder, "optimizer.", world=world))
    assert assert_loads(folder) == {"model.w", "model.v"}

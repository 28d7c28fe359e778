"""A backend of one's own for tensors, given as a table; objects and common state stay in the native format."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import shardtree as st
from shardtree.codec import decode_tree, encode_tree
from shardtree.errors import KeyMismatch, StrategyError
from shardtree.storage import MemoryStorage, ReadReport
from shardtree.strategies import AsyncRequest, StrategyAction, default_strategies

TOY = ("toy", 1)


def toy_save(pending, shards):
    """Each rank writes one file with all of its shards."""
    rows = [(shard.key, shard.global_shape, shard.global_offset, shard.data) for shard in shards]
    name = f"toy-{pending.world.rank}"

    def write():
        return pending.storage.write(name, [memoryview(encode_tree(rows))], durable=pending.options.durable)

    return AsyncRequest(pending.world, write, lambda lengths: {"toy_files": len(lengths)})


def stored_rows(checkpoint):
    for rank in range(checkpoint.fields["toy_files"]):
        yield from decode_tree(memoryview(bytearray(checkpoint.storage.read(f"toy-{rank}"))))


def toy_load(checkpoint, shards):
    done = 0
    for shard in shards:
        found = {row[0]: torch.empty(row[1], dtype=row[3].dtype) for row in stored_rows(checkpoint)}
        if shard.key not in found:
            raise KeyMismatch(f"no {shard.key!r}")
        for key, _, offset, data in stored_rows(checkpoint):
            box = tuple(slice(begin, begin + size) for begin, size in zip(offset, data.shape, strict=True))
            found[key][box] = data
        shard.data.copy_(found[shard.key][shard.global_slice()])
        done += shard.data.nbytes
    return ReadReport(bytes_read=done)


def toy_metadata(checkpoint):
    return {
        key: st.ShardedTensor(key, None, data.dtype, shape, shape, (0,) * len(shape), None)
        for key, shape, _, data in stored_rows(checkpoint)
    }


TABLE = default_strategies | {
    (StrategyAction.SAVE_SHARDED, *TOY): toy_save,
    (StrategyAction.LOAD_SHARDED, *TOY): toy_load,
    (StrategyAction.LOAD_METADATA, *TOY): toy_metadata,
}


def tree(rank=0, ranks=1, fill=None):
    whole = torch.arange(12.0).view(4, 3)
    mine = whole.chunk(ranks)[rank] if fill is None else torch.full((4 // ranks, 3), fill)
    return {
        "w": st.ShardedTensor.from_rank_offsets("w", mine, (0, rank, ranks)),
        "o": st.ShardedObject("o", {"all": [1]}, (1,), (0,), replica_id=rank),
        "step": 5,
    }


def saved(strategy=TOY, ranks=2):
    folder = MemoryStorage()

    def save(world):
        return st.save(tree(world.rank, ranks), folder, strategy, world=world, strategies=TABLE)

    st.simulate(ranks, save)
    return folder


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tensors_of_one_backend_and_objects_of_another_load_together(ranks):
    folder = saved()
    load = partial(st.load, checkpoint_dir=folder, strategies=TABLE, strict="raise_all")
    for loaded in st.simulate(ranks, lambda world: load(tree(world.rank, ranks, fill=0.0), world=world)):
        assert loaded["o"] == {"all": [1]} and loaded["step"] == 5
    parts = st.simulate(ranks, lambda world: load(tree(world.rank, ranks, fill=0.0), world=world)["w"])
    assert torch.equal(torch.cat(parts), torch.arange(12.0).view(4, 3))


def test_the_mixture_can_be_looked_into():
    folder = saved()
    assert set(st.load_sharded_metadata(folder, strategies=TABLE)) == {"w", "o/shard_0_1"}
    assert set(st.load_tensors_metadata(folder, strategies=TABLE)) == {"w"}
    opened = st.open_checkpoint(folder, strategies=TABLE)
    assert opened["w"].data[1:3, 1].read().tolist() == [4.0, 7.0]
    assert opened["o/shard_0_1"].data == {"all": [1]}
    assert st.load_plain_tensors(folder, strategies=TABLE)["w"][3].tolist() == [9, 10, 11]
    assert st.load_common_state_dict(folder, strategies=TABLE) == {"step": 5}


def test_without_the_table_the_error_names_the_backend():
    folder = saved()
    with pytest.raises(StrategyError, match="backend 'toy', version 1"):
        st.load(tree(), folder)


def test_a_mixture_is_overwritten_and_its_left_overs_go():
    folder = saved()
    st.simulate(2, lambda world: st.save(tree(world.rank, 2), folder, world=world, overwrite=True))
    assert st.load(tree(fill=0.0), folder)["w"].sum() == 66
    assert len([name for name in folder.names() if name.startswith("save-")]) == 1


@pytest.mark.parametrize(
    "choice", [("safetensors", 1), default_strategies[StrategyAction.SAVE_SHARDED, "safetensors", 1]]
)
def test_a_strategy_is_a_pair_or_a_function(choice):
    folder = MemoryStorage()
    common = default_strategies[StrategyAction.SAVE_COMMON, "safetensors", 1]
    st.save(tree(), folder, choice, common)
    load_sharded = default_strategies[StrategyAction.LOAD_SHARDED, "safetensors", 1]
    load_common = default_strategies[StrategyAction.LOAD_COMMON, "safetensors", 1]
    for chosen in ((("safetensors", 1), ("safetensors", 1)), (load_sharded, load_common), (None, load_common)):
        loaded = st.load(tree(fill=0.0), folder, *chosen)
        assert torch.equal(loaded["w"], tree()["w"].data) and loaded["o"] == {"all": [1]} and loaded["step"] == 5


def test_a_function_replaces_the_row_for_one_call():
    folder = saved(None)
    seen = []

    def watched(checkpoint, shards):
        seen.append([shard.key for shard in shards])
        return default_strategies[StrategyAction.LOAD_SHARDED, "safetensors", 1](checkpoint, shards)

    assert st.load(tree(fill=0.0), folder, watched)["w"].sum() == 66
    assert st.load({}, folder, None, lambda checkpoint: {"from": "a function"}) == {"from": "a function"}
    assert seen == [["w"]]

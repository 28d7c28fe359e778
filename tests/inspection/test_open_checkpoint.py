"""An open checkpoint is a mapping of lazy shards: trees compose over it, and only asked-for bytes are read."""

from __future__ import annotations

import os

import pytest
import torch

import shardtree as st
from shardtree.errors import KeyMismatch
from shardtree.testing import transposed
from tests.shell.checkpoint import parts
from tests.shell.checkpoint.parts import noting, saved_by, whole

W = torch.arange(1024 * 64, dtype=torch.float32).view(1024, 64)


def saved():
    count = []
    trees = [
        {
            "decoder.weight": whole("decoder.weight", rows, (0, rank, 4)),
            "decoder.bias": whole("decoder.bias", torch.arange(3), replica_id=rank),
            "rng": st.ShardedObject("rng", {"rank": rank}, (4,), (rank,)),
            "step": 7,
        }
        for rank, rows in enumerate(W.chunk(4))
    ]
    watched = noting(saved_by(trees), lambda name, begin, end: count.append((end - begin) * ("-of-" in name)))
    watched.count = count
    return watched


def test_it_is_a_read_only_mapping_by_key():
    folder = saved()
    opened = st.open_checkpoint(folder)
    assert list(opened) == ["decoder.bias", "decoder.weight", *(f"rng/shard_{rank}_4" for rank in range(4))]
    assert len(opened) == 6 and "decoder.bias" in opened and "nothing" not in opened
    assert "6 keys" in repr(opened)
    assert opened.common() == {"step": 7}
    assert list(st.load_tensors_metadata(folder)) == ["decoder.bias", "decoder.weight"]
    shard = opened["decoder.weight"]
    assert (shard.global_shape, shard.dtype, shard.replica_id) == ((1024, 64), torch.float32, 0)
    assert isinstance(shard.data, st.LazyTensor)
    assert opened["rng/shard_2_4"].data == {"rank": 2}
    with pytest.raises(KeyMismatch, match="'nothing'"):
        opened["nothing"]
    with pytest.raises(TypeError):
        opened["decoder.bias"] = shard
    assert opened.nested()["decoder"]["bias"].data.read().tolist() == [0, 1, 2]
    loaded = st.load({"w": shard, "r": opened["rng/shard_1_4"]}, folder, validate_access_integrity=False)
    assert torch.equal(loaded["w"], W) and loaded["r"] == {"rank": 1}


@pytest.mark.parametrize(
    ("pick", "most"),
    [
        (lambda w: w[0:10, :], 10 * 64 * 4),
        (lambda w: w[5, 7], 4),
        (lambda w: w[0:0], 0),
        (lambda w: w.narrow(0, 300, 20).to(torch.float64), 20 * 64 * 4),
        (lambda w: torch.cat([w[:2], w[-2:]]), 4 * 64 * 4),
    ],
)
def test_only_the_asked_for_bytes_are_read(pick, most):
    folder = saved()
    lazy = pick(st.open_checkpoint(folder, options=st.LoadOptions(verify=None))["decoder.weight"].data)
    assert sum(folder.count) == 0
    assert torch.equal(lazy.read(), pick(W))
    assert sum(folder.count) == most


def test_tree_functions_compose_over_it_before_anything_is_read():
    folder = saved()
    opened = st.open_checkpoint(folder, options=st.LoadOptions(verify=None))
    tree = st.cast(st.prefix({"w": opened["decoder.weight"]}, "new."), torch.bfloat16)
    built = st.apply_factories(tree | {"t": transposed("t", tree["w"].data[:8])})
    assert built["t"].global_shape == (64, 8) and sum(folder.count) == 0
    plain = st.load_plain_tensors(parts.saved(built))
    assert torch.equal(plain["new.decoder.weight"], W.bfloat16()) and torch.equal(plain["t"], W[:8].bfloat16().t())
    assert sum(folder.count) == (1024 + 8) * 64 * 4


def test_a_relative_path_is_that_of_when_the_checkpoint_was_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(2))}, "ck")
    tree = st.open_checkpoint("ck")
    (tmp_path / "elsewhere").mkdir()
    os.chdir("elsewhere")
    assert tree["w"].data.read().tolist() == [1, 1]
    assert st.is_checkpoint(os.path.join("..", "ck"))

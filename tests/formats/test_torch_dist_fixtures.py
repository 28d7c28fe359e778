"""Checkpoints that Megatron-Core wrote load in other layouts than their own, element by element."""

from __future__ import annotations

import json
import math
import zlib

import pytest
import torch

import shardtree as st
from shardtree.errors import CorruptCheckpoint
from tests.formats.optimizer_formats import FIXTURES, LAYOUTS, wrong_in_layout
from tests.shell.table.folders import folder_of

GPT = ("megatron_0161_tp2", "megatron_main202608_tp2")
FLAT = "megatron_0140_torch_dist_flat"

GPT_TENSORS = {
    "embedding.word_embeddings.weight": ((24, 16), torch.float32),
    "decoder.final_layernorm.weight": ((16,), torch.float32),
    "decoder.layers.self_attention.linear_qkv.weight": ((4, 48, 16), torch.float32),
    "decoder.layers.mlp.linear_fc1.weight": ((4, 64, 16), torch.float32),
    "decoder.layers.mlp.linear_fc2.weight": ((4, 16, 32), torch.float32),
    "decoder.layers.mlp.linear_fc2.bias": ((4, 16), torch.bfloat16),
    **{f"het.layers.{layer}.weight": ((16, 16), torch.float16) for layer in range(4)},
    "uneven.weight": ((30, 5), torch.float32),
    "step": ((), torch.int64),
}
FLAT_TENSORS = {
    "layer.weight": ((8, 6), torch.float32),
    "stack.weight": ((4, 8, 6), torch.float32),
    "layer.bias_bf16": ((5,), torch.bfloat16),
    "optimizer.state.exp_avg.layer.weight": ((8, 6), torch.float32),
    "optimizer.state.exp_avg.layer.weight_ax1": ((8, 6), torch.float32),
    "optimizer.state.exp_avg.layer.bias": ((12,), torch.float32),
}
TENSORS = dict.fromkeys(GPT, GPT_TENSORS) | {FLAT: FLAT_TENSORS}

GPT_COMMON = {
    "optimizer": {"param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95)}]},
    "args": {"hidden_size": 16, "num_layers": 4},
    "iteration": 42,
    "checkpoint_version": 3.0,
    "empty_dict": {},
    "lst": [1, {"a": 2}, [3, 4]],
    "content_metadata": {"distrib_optim_sharding_type": "dp_reshardable", "chained_optim_avoid_prefix": True},
}


def value(key, shape, dtype):
    """What a fixture's tensor holds; `tests/fixtures/README.md` has the formula."""
    if key == "step":
        return torch.tensor(7)
    flat = torch.arange(math.prod(shape)) % 251 + zlib.crc32(key.encode()) % 97
    return flat.reshape(shape).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TENSORS)
def test_every_tensor_loads_in_another_layout(name, layout):
    expected = {key: value(key, *kind) for key, kind in TENSORS[name].items()}
    assert wrong_in_layout(FIXTURES / name, expected, layout) == []


@pytest.mark.parametrize("name", GPT)
def test_objects_and_common_state_are_those_that_were_saved(name):
    opened = st.open_checkpoint(FIXTURES / name)
    assert sorted(key for key, item in opened.items() if isinstance(item, st.ShardedObject)) == [
        *(f"decoder.layers.self_attention._extra_state/shard_{layer}_4" for layer in range(4)),
        *(f"rng_state/shard_0.{rank}_1.2" for rank in range(2)),
    ]
    rng = [st.ShardedObject("rng_state", None, (1, 2), (0, rank)) for rank in range(2)]
    extra = [st.ShardedObject("decoder.layers.self_attention._extra_state", None, (4,), (n,)) for n in range(4)]
    loaded = st.load({"rng": rng, "extra": extra}, FIXTURES / name)
    assert loaded["rng"] == [[{"seed": 1000}], [{"seed": 1001}]]
    for layer, state in enumerate(loaded["extra"]):
        assert state["layer"] == layer
        assert torch.equal(state["fp8"], torch.full((2,), float(layer)))
    common = st.load_common_state_dict(FIXTURES / name)
    assert torch.equal(common.pop("common_tensor"), torch.arange(5))
    assert common == GPT_COMMON
    assert st.load_content_metadata(FIXTURES / name) == GPT_COMMON["content_metadata"]


def test_the_flat_ones_objects_and_common_state_are_those_that_were_saved():
    rng = [st.ShardedObject("rng_state", None, (1, 2), (0, rank)) for rank in range(2)]
    extra = st.ShardedObject("layer._extra_state", None, (1,), (0,))
    loaded = st.load({"rng": rng, "extra": extra}, FIXTURES / FLAT)
    assert loaded["rng"] == [{"tp": 0}, {"tp": 1}]
    assert loaded["extra"] == {"x": 7}
    assert (loaded["iteration"], loaded["args"], loaded["lst"]) == (42, {"a": 1}, [1, {"a": 2}])


# Two ways of one format: what says that the common state is in an object is metadata.json.


def copied(name, **fields):
    files = {path.name: path.read_bytes() for path in (FIXTURES / name).iterdir()}
    metadata = json.loads(files["metadata.json"]) | fields
    return folder_of(files | {"metadata.json": json.dumps(metadata).encode()})


def test_the_common_object_is_listed_where_it_is_not_the_common_state():
    folder = copied(GPT[1], common_backend="torch", common_backend_version=1)
    assert "common_state/shard_0_1" in st.load_sharded_metadata(folder)
    assert "common_state/shard_0_1" not in st.load_sharded_metadata(FIXTURES / GPT[1])


def test_a_checkpoint_without_its_common_object_says_so():
    with pytest.raises(CorruptCheckpoint, match="common_state/shard_0_1"):
        st.load_common_state_dict(copied(GPT[0], common_backend="torch_dist", common_backend_version=1))


def test_the_files_of_tensors_alone_are_a_folder_of_dcp():
    folder = copied(GPT[0])
    folder.remove("metadata.json")
    folder.remove("common.pt")
    key = "uneven.weight"
    assert torch.equal(st.load_plain_tensors(folder)[key], value(key, (30, 5), torch.float32))
    assert st.load_common_state_dict(folder) == {}

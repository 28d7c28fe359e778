"""The less common ways in which Megatron-Core stores an optimizer: each opens, or the error says what it is."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardtree as st
from shardtree.errors import CorruptCheckpoint, UnsupportedValue
from shardtree.storage import MemoryStorage
from tests.strategies.test_torch_dist_read import Writer

FIELDS: dict[str, object] = {f"{kind}_backend": "torch_dist" for kind in ("sharded", "common")}
FIELDS |= {f"{kind}_backend_version": 1 for kind in ("sharded", "common")}
WEIGHT = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
STATES = {"fp32_param": WEIGHT, "exp_avg": WEIGHT + 1, "exp_avg_sq": WEIGHT**2}


def flat_folder(states: dict[str, torch.Tensor]) -> MemoryStorage:
    """`fully_sharded_model_space`: two tensor-parallel ranks' rows, each cut in two flat ranges."""
    writer = Writer(files=1)
    for rank, rows in enumerate(WEIGHT.bfloat16().chunk(2)):
        writer.add("w", (4, 6), (2 * rank, 0), rows.contiguous())
    for name, state in states.items():
        for rank, rows in enumerate(state.chunk(2)):
            for start, part in zip((0, 5), rows.flatten().split([5, 7]), strict=True):
                place = (rank, 0, start)
                inside = part.reshape(1, 1, -1).contiguous()
                whole = {"nd_reformulated_orig_global_shape": (4, 6)}
                writer.add(f"optimizer.state.{name}.w", (2, 1, 12), place, inside, **whole)
    folder = writer.folder()
    folder.write("metadata.json", [memoryview(json.dumps(FIELDS).encode())], durable=False)
    return folder


def test_flat_ranges_of_the_model_are_states_in_its_shapes() -> None:
    opened = st.open_checkpoint(flat_folder(STATES))
    for name, state in STATES.items():
        assert torch.equal(opened[f"optimizer.state.{name}.w"].data.read(), state)


def test_their_masters_are_compared_too() -> None:
    folder = flat_folder(STATES | {"fp32_param": WEIGHT.roll(1)})
    with pytest.raises(CorruptCheckpoint, match=r"'optimizer.state.fp32_param.w': in bfloat16 it isn't 'w'"):
        st.open_checkpoint(folder)["optimizer.state.exp_avg.w"].data.read()


def test_one_object_with_all_states_is_named() -> None:
    folder = MemoryStorage()
    data = st.ShardedObject("optimizer.distributed.dp_group_idx_0.param_state", {"a": WEIGHT}, (1,), (0,))
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", WEIGHT), "o": data}, folder, ("torch_dist", 1))
    wanted = st.ShardedTensor.from_rank_offsets("optimizer.state.exp_avg.w", torch.zeros(4, 6))
    with pytest.raises(UnsupportedValue, match="dp_zero_gather_scatter"):
        st.load([wanted], folder)
    (refused,) = st.explain([wanted], folder).refused
    assert "dp_zero_gather_scatter" in str(refused)
    assert torch.equal(st.open_checkpoint(folder)[f"{data.key}/shard_0_1"].data["a"], WEIGHT)


def usual_name(key: str) -> str:
    """The name that a key of Megatron-FSDP's has here."""
    state = re.fullmatch(r"optimizer\.state\.(?:module\.)+(.+)\.(\w+)", key)
    return f"optimizer.state.{state[2]}.{state[1]}" if state else key.removeprefix("model.module.")


def test_a_folder_of_megatron_fsdp_opens_and_takes_the_usual_names(tmp_path: Path) -> None:
    """`fsdp_dtensor` is what torch.distributed.checkpoint writes of nested dicts."""
    moments = {name: STATES[name] for name in ("exp_avg", "exp_avg_sq")}
    groups = {"module.w": {"lr": 0.1, "step": 3}}
    tree = {"model": {"module.w": WEIGHT}, "optimizer": {"state": {"module.w": moments}, "param_to_group_meta": groups}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own
        dcp.save(tree | {"iteration": 3}, checkpoint_id=tmp_path / "fsdp", no_dist=True)
    rename = st.bind(st.rename, usual_name)
    st.convert(tmp_path / "fsdp", tmp_path / "ours", backend="safetensors", transform=rename)
    found = st.load_plain_tensors(tmp_path / "ours")
    assert torch.equal(found["w"], WEIGHT) and torch.equal(found["optimizer.state.exp_avg.w"], WEIGHT + 1)
    assert st.load_common_state_dict(tmp_path / "ours")["optimizer"]["param_to_group_meta"] == groups

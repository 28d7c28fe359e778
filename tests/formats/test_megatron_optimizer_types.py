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
from shardtree.checkpoint import OpenCheckpoint
from shardtree.errors import CorruptCheckpoint, UnsupportedValue
from shardtree.interop.megatron_optimizer import model_space
from shardtree.storage import MemoryStorage
from tests.cli.checkpoints import run
from tests.formats.test_torch_dist_read import Writer

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
    return writer.folder(**{"metadata.json": json.dumps(FIELDS).encode()})


def test_flat_ranges_of_the_model_are_states_in_its_shapes() -> None:
    opened = st.open_checkpoint(flat_folder(STATES))
    for name, state in STATES.items():
        assert torch.equal(opened[f"optimizer.state.{name}.w"].data.read(), state)


def test_their_masters_are_compared_too() -> None:
    folder = flat_folder(STATES | {"fp32_param": WEIGHT.roll(1)})
    with pytest.raises(CorruptCheckpoint, match=r"'optimizer.state.fp32_param.w': in bfloat16 it is not 'w'"):
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


MOMENTUM = "optimizer.state.momentum_buffer.w"


def with_muon(folder: Path) -> OpenCheckpoint:
    """What Megatron-Core writes of Muon beside a distributed Adam: two optimizers, of which the second has buckets."""
    tensors = {key: st.ShardedTensor.from_rank_offsets(key, WEIGHT) for key in ("w", f"chained_0.{MOMENTUM}")}
    key = "chained_1.optimizer.distributed.dp_group_idx_0.optimizer"
    groups = st.ShardedObject(key, {"param_groups": [{"lr": 0.2}]}, (1,), (0,))
    muon = {"optimizer": {"param_groups": [{"lr": 0.1, "momentum": 0.95}]}}
    optimizer = {0: muon, 1: {"param_state_sharding_type": "dp_reshardable"}}
    st.save({"tensors": tensors, "objects": groups, "optimizer": optimizer}, folder, ("torch_dist", 1))
    return st.open_checkpoint(folder)


def test_muon_beside_the_distributed_optimizer_keeps_its_groups_and_its_states_their_values(tmp_path: Path) -> None:
    opened = with_muon(tmp_path / "buckets")
    st.convert(tmp_path / "buckets", tmp_path / "full", backend="torch_dist", **model_space(opened))
    run(
        "convert", str(tmp_path / "buckets"), str(tmp_path / "same"), "--to", "torch_dist", "--optimizer", "model-space"
    )
    for name in ("full", "same"):
        found = st.load_common_state_dict(tmp_path / name)["optimizer"]
        assert found[0] == {"optimizer": {"param_groups": [{"lr": 0.1, "momentum": 0.95}]}}
        assert found[1] == {
            "param_state_sharding_type": "fully_reshardable",
            "optimizer": {"param_groups": [{"lr": 0.2}]},
        }
        tensors = st.load_plain_tensors(tmp_path / name)
        assert tensors.keys() == {"w", MOMENTUM} and torch.equal(tensors[MOMENTUM], WEIGHT)


@pytest.mark.parametrize("wanted", [True, False])
def test_experts_of_muon_are_neither_joined_nor_split(wanted: bool, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedValue, match="has optimizers that are not distributed"):
        model_space(with_muon(tmp_path), expert_parallel=wanted)


def test_remainders_in_place_of_masters_are_refused_in_both_formats() -> None:
    """A precision-aware optimizer keeps the 16 bits of each master that its weight lacks, `store_param_remainders`."""
    remainders = (WEIGHT.view(torch.int32) & 0xFFFF).to(torch.int16)
    with pytest.raises(CorruptCheckpoint, match="16-bit remainders"):
        st.open_checkpoint(flat_folder(STATES | {"fp32_param": remainders.float()}))[
            "optimizer.state.exp_avg.w"
        ].data.read()
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
    states = {"param": remainders, "exp_avg": WEIGHT, "exp_avg_sq": WEIGHT}
    shards = {
        name: st.ShardedTensor.from_rank_offsets(f"{bucket}.{name}", one.flatten()) for name, one in states.items()
    }
    weight = st.ShardedTensor.from_rank_offsets("w", WEIGHT.bfloat16())
    folder = MemoryStorage()
    st.save({"w": weight, **shards}, folder, ("torch_dist", 1))
    opened = st.open_checkpoint(folder)
    assert torch.equal(opened["w"].data.read(), WEIGHT.bfloat16())
    with pytest.raises(UnsupportedValue, match=r"has only the low 16 bits of its fp32 master weights"):
        opened["optimizer.state.exp_avg.w"]

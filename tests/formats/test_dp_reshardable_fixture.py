"""A real `dp_reshardable` checkpoint of Megatron-Core 0.16.1: its states, in other layouts, and as it loads them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import shardtree as st
from shardtree.errors import UnsupportedValue
from shardtree.formats.torch_dist import _optimizer
from shardtree.interop.megatron_optimizer import model_space
from tests.cli.checkpoints import run
from tests.formats.optimizer_formats import FIXTURES

NAME = "megatron_0161_dp_reshardable_tp2dp2"
FOLDER = FIXTURES / NAME / "checkpoint"
TRUTH = load_file(FIXTURES / NAME / "truth.safetensors")
MODEL = [key.removeprefix("optimizer.state.param.") for key in TRUTH if key.startswith("optimizer.state.param.")]
STEPS = {f"optimizer.state.step.{key}": torch.tensor(3.0) for key in MODEL}


def test_a_picture_of_the_whole_shows_the_largest_buckets_and_reads_no_weights(monkeypatch):
    monkeypatch.setattr("shardtree.formats.torch_dist._optimizer.read_bucket", None)
    opened = st.open_checkpoint(FOLDER)
    assert "6 tensors in 4 files" in str(st.draw(opened)) and "bucket" in opened._repr_html_()
    assert opened.stored_layout(MODEL[0]).columns.keys == (MODEL[0],)


@pytest.fixture
def readers(monkeypatch):
    """Return a list with an entry for each rank that reads the buckets."""
    found, original = [], _optimizer.buckets_of
    monkeypatch.setattr(_optimizer, "buckets_of", lambda tensors: found.append(1) or original(tensors))
    return found


def test_one_rank_reads_the_buckets_for_all(readers):
    key = "optimizer.state.exp_avg.output_layer.weight"

    def load(world):
        target = st.ShardedTensor.from_rank_offsets(key, torch.zeros(16, 32), (0, world.rank, 4))
        return st.load({"w": target} if world.rank else {}, FOLDER, world=world, validate_access_integrity=False)

    loaded = st.simulate(4, load)
    assert all(torch.equal(loaded[rank]["w"], TRUTH[key][16 * rank :][:16]) for rank in (1, 2, 3))
    assert readers == [1]


def test_experts_get_an_optimizer_of_their_own_for_a_run_with_expert_parallelism(tmp_path):
    options = "--to", "torch_dist", "--optimizer", "model-space", "--expert-parallel"
    run("convert", str(FOLDER), str(tmp_path / "full"), *options)
    optimizers = st.load_common_state_dict(tmp_path / "full")["optimizer"]
    assert optimizers.keys() == {0, 1}
    for number, optimizer in optimizers.items():
        assert optimizer["param_state_sharding_type"] == "fully_reshardable"
        groups = optimizer["optimizer"]["param_groups"]
        assert [group["is_expert_parallel"] for group in groups] == [number == 1] * 2


def with_experts(folder, groups, **options):
    """Save what two optimizers have of objects, and return the checkpoint, opened."""
    keys = [f"chained_{number}.optimizer.distributed.dp_group_idx_0.optimizer" for number in (0, 1)]
    objects = [
        st.ShardedObject(key, {"param_groups": [group]}, (1,), (0,)) for key, group in zip(keys, groups, strict=True)
    ]
    st.save({"objects": objects, "optimizer": {0: {}, 1: {}}}, folder, **options)
    return st.open_checkpoint(folder)


@pytest.mark.parametrize("name", ["lr", "max_lr", "end_wd"])
@pytest.mark.parametrize("newer", [False, True])
def test_groups_that_a_release_tells_apart_are_joined(newer, name, tmp_path):
    """Releases before 0.19, which write a common.pt, would take one of the two groups for both."""
    shared = {"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False, "step": 3.0}
    groups = [shared | {name: 1e-4, "is_expert_parallel": False}, shared | {name: 2e-4, "is_expert_parallel": True}]
    opened = with_experts(tmp_path, groups, sharded_strategy=("torch_dist", 1), common_strategy=("torch_dist", 1))
    if not newer or name == "lr":  # no optimizer has two of these
        with pytest.raises(UnsupportedValue, match="different hyperparameters for experts"):
            model_space(opened, expert_parallel=False)
        return
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    common = model_space(st.open_checkpoint(tmp_path), expert_parallel=False)["transform_common"]({})
    assert [group[name] for group in common["optimizer"]["optimizer"]["param_groups"]] == [1e-4, 2e-4]


def test_equal_groups_of_two_optimizers_are_one(tmp_path):
    shared = {"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False, "step": 3.0, "lr": 1e-4}
    groups = [shared | {"is_expert_parallel": False}, shared | {"is_expert_parallel": True}]
    opened = with_experts(tmp_path, groups)
    common = model_space(opened, expert_parallel=False)["transform_common"](st.load_common_state_dict(tmp_path))
    assert common["optimizer"]["optimizer"] == {"param_groups": groups[:1]}
    assert common["optimizer"].keys() == {"optimizer", "param_state_sharding_type"}

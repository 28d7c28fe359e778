"""check_replicas of a folder: by format, the copies that ranks' files have of one tensor, and who agrees with whom.

Of each format a drift is planted in what some ranks stored: it is told with the tensor, the box, all holders on both
sides, the count and the distance; and before that the folder is equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch.distributed.tensor import Replicate, Shard

import shardtree as st
from shardtree.errors import CorruptCheckpoint, UnsupportedValue
from shardtree.inspection._replicas import ReplicaDifference
from shardtree.storage import MemoryStorage
from tests.cli.checkpoints import document, run
from tests.core.trees.samples import assert_caught
from tests.formats.buckets import Job, layer_kinds
from tests.formats.optimizer_formats import FIXTURES
from tests.formats.zero_folders import Save, folder_of, model_file, optimizer_file, put, universal_of
from tests.interop.dtensor_cases import Case, numbered
from tests.shell.table.folders import archive

ULP = 2**-23
SAVE = Save([{"a": (5, 3), "b": (4,)}, {"d": (7,)}], ranks=4, stage=3)
Drift = dict[int, int]
"""By how many ulp a rank's copy is off, in one element."""


def drifted(data: torch.Tensor, ulps: int, element: int) -> torch.Tensor:
    """Return a copy with an element that is a few numbers further."""
    changed = data.clone()
    changed.view(-1)[element] += ulps * ULP
    return changed


# Writers: a folder whose ranks have copies of ones, in which some have drifted


def with_buffers(folder: MemoryStorage, save: Any, ranks: list[torch.Tensor], within: str = "") -> MemoryStorage:
    """Put a buffer into each rank's model file."""
    for rank, norm in enumerate(ranks):
        file = model_file(save, rank)
        file["module"]["norm.running_mean"] = norm
        folder.replace(f"{within}zero_pp_rank_{rank}_mp_rank_00_model_states.pt", archive(file), durable=False)
    return folder


def zero3(ranks: list[torch.Tensor]) -> MemoryStorage:
    """DeepSpeed's ZeRO-3: each rank's model file has the buffers."""
    save = replace(SAVE, ranks=len(ranks))
    folder = folder_of(save)
    return with_buffers(folder, save, ranks, "step_3/")


def universal(ranks: list[torch.Tensor]) -> MemoryStorage:
    """What DeepSpeed makes of ZeRO-3: states by parameter, and the same model files."""
    save = replace(SAVE, ranks=len(ranks))
    folder = universal_of(save, is_flat=True)
    return with_buffers(folder, save, ranks)


def rank_files(ranks: list[torch.Tensor], folder: Any = None) -> Any:
    """verl's, or a loop's over FSDP2: plain tensors in each rank's file."""
    folder = MemoryStorage() if folder is None else folder
    for rank, norm in enumerate(ranks):
        put(folder, f"model_world_size_{len(ranks)}_rank_{rank}.pt", archive({"norm.running_mean": norm}))
    return folder


def items(ranks: list[torch.Tensor]) -> MemoryStorage:
    """torch_checkpointing's: an item a file and a rank."""
    folder = MemoryStorage()
    for rank, norm in enumerate(ranks):
        put(folder, f"model_{rank}.pt", archive({"norm": {"running_mean": norm}}))
    return folder


WRITERS = {"zero3": zero3, "universal": universal, "rank_files": rank_files, "items": items}
KEYS = {"items": "model.norm.running_mean"}
Check = Callable[[Any], tuple[ReplicaDifference, ...]]


@some.composite
def drifts(draw: some.DrawFn) -> tuple[str, int, Drift, int]:
    ranks = draw(some.integers(2, 4))
    drift = draw(some.dictionaries(some.integers(0, ranks - 1), some.integers(1, 3), max_size=3))
    return draw(some.sampled_from(sorted(WRITERS))), ranks, drift, draw(some.integers(0, 5))


def tells_who_drifted(check: Check, drawn: tuple[str, int, Drift, int]) -> None:
    name, ranks, drift, element = drawn
    norm = torch.ones(2, 3)
    found = check(WRITERS[name]([drifted(norm, drift.get(rank, 0), element) for rank in range(ranks)]))
    groups: dict[int, set[int]] = {}
    for rank in range(ranks):
        groups.setdefault(drift.get(rank, 0), set()).add(rank)
    first = drift.get(0, 0)
    expected = {
        (frozenset(held), frozenset(groups[first]), abs(ulps - first)) for ulps, held in groups.items() if ulps != first
    }
    told = set()
    for each in found:
        assert each.values is not None and each.key == KEYS.get(name, "norm.running_mean")
        assert (each.box, each.values.count, each.values.elements) == ("[0:2, 0:3]", 1, 6)
        assert each.values.first == (element // 3, element % 3)
        holders, than = (frozenset(map(rank_of, side)) for side in (each.holders, each.than))
        told.add((holders, than, each.values.ulps))
    assert told == expected and len(found) == len(expected)


def rank_of(file: str | int) -> int:
    """Return the rank whose file it is."""
    name = str(file).rpartition("/")[2].replace("_mp_rank_00_model_states", "").rpartition(".")[0]
    return int(name.rpartition("_")[2])


@given(drifts())
def test_it_tells_who_drifted_and_who_agrees(drawn: tuple[str, int, Drift, int]) -> None:
    tells_who_drifted(st.check_replicas, drawn)


def test_the_law_catches_a_check_of_the_files_that_differ_alone() -> None:
    def careless(folder: Any) -> Any:
        return tuple(replace(each, than=each.than[:1]) for each in st.check_replicas(folder))

    assert_caught(tells_who_drifted, careless, drifts())


@pytest.mark.parametrize("ulps", [0, 1])
def test_the_command_shows_them(ulps: int, tmp_path: Path) -> None:
    rank_files([torch.ones(2), drifted(torch.ones(2), ulps, 0)], st.storage.LocalStorage(str(tmp_path)))
    shown = run("verify", "--replicas", tmp_path)
    assert shown.exit_code == ulps and ("'norm.running_mean'" in shown.output) == bool(ulps)
    told = document("verify", "--replicas", tmp_path, "--json", status=ulps)
    assert told["equal"] == (not ulps) and [each["key"] for each in told["differences"]] == ["norm.running_mean"] * ulps


# What a format has of its own


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("as_number", [False, True])
def test_steps_of_deepspeed_s_ranks_that_differ_are_told_and_refused(stage: int, as_number: bool) -> None:
    save = replace(SAVE, stage=stage)
    folder = folder_of(save)
    for rank in range(save.ranks):
        file = optimizer_file(save, rank)
        inner = file["optimizer_state_dict"]
        base = inner["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
        step = 3.0 + (rank == 2)
        base["state"][1]["step"] = step if as_number else torch.tensor(step)
        name = f"step_3/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        folder.replace(name, archive(file), durable=False)
    (found,) = st.check_replicas(folder)
    assert found.key == "optimizer.state.step.d" and [*map(rank_of_step, found.holders)] == [2]
    assert [*map(rank_of_step, found.than)] == [0, 1, 3] and found.box == "[]"
    assert found.values is not None and (found.values.left, found.values.right) == (3.0, 4.0)
    with pytest.raises(UnsupportedValue, match=r"'optimizer.state.step.d': .*have different copies"):
        st.load_plain_tensors(folder)


def rank_of_step(file: str | int) -> int:
    return int(str(file).partition("pp_rank_")[2].partition("_")[0])


def test_steps_in_deepspeed_s_groups_are_compared() -> None:
    save = replace(SAVE, stage=1)
    folder = folder_of(save)
    for rank in range(save.ranks):
        file = optimizer_file(save, rank)
        base = file["optimizer_state_dict"]["base_optimizer_state"]
        for number, group in enumerate(base["param_groups"]):
            del base["state"][number]["step"]
            group["step"] = 3 + (rank == 1)
        folder.replace(f"step_3/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", archive(file), durable=False)
    assert {found.key for found in st.check_replicas(folder)} == {f"optimizer.state.step.{one}" for one in "abd"}


def test_ranks_of_deepspeed_with_other_groups_of_hyperparameters_are_refused() -> None:
    folder, file = folder_of(SAVE), optimizer_file(SAVE, 2)
    file["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"].pop()
    folder.replace("step_3/bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt", archive(file), durable=False)
    with pytest.raises(CorruptCheckpoint, match=r"different numbers of hyperparameter groups\n  found \[1, 2\] groups"):
        st.check_replicas(folder)


def test_steps_that_are_numbers_in_ranks_files_are_compared() -> None:
    folder = MemoryStorage()
    for rank in range(3):
        put(folder, f"model_world_size_3_rank_{rank}.pt", archive({"w": torch.ones(2)}))
        state = {"state": {0: {"step": 7 + (rank == 2), "exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]}
        put(folder, f"optim_world_size_3_rank_{rank}.pt", archive(state))
    (found,) = st.check_replicas(folder)
    assert (found.key, [*map(rank_of, found.holders)]) == ("optimizer.state.step.0", [2])
    with pytest.raises(UnsupportedValue, match=r"'optimizer.state.step.0': .*have different copies"):
        st.load_plain_tensors(folder)
    assert st.load_plain_tensors(folder, options=st.LoadOptions(verify=None))["optimizer.state.step.0"] == 7


def test_a_copy_of_another_shape_or_dtype_and_one_that_is_missing_are_told() -> None:
    for other in (torch.ones(3), torch.ones(2, dtype=torch.float64)):
        (found,) = st.check_replicas(rank_files([torch.ones(2), other, torch.ones(2)]))
        assert found.values is None and [*map(rank_of, found.holders)] == [1] and [*map(rank_of, found.than)] == [0, 2]
        assert str(found).endswith(": no elements, or another dtype or shape")
    folder = zero3([torch.ones(2)] * 4)
    lacking = model_file(SAVE, 3)
    folder.replace("step_3/zero_pp_rank_3_mp_rank_00_model_states.pt", archive(lacking), durable=False)
    (found,) = st.check_replicas(folder)
    assert found.values is None and [*map(rank_of, found.holders)] == [3] and len(found.than) == 3


def test_copies_of_hsdp_have_their_box_of_the_tensor() -> None:
    case = Case(numbered((5, 3)), torch.arange(4).view(2, 2), ("ddp", "fsdp"), (Replicate(), Shard(0)))
    tensors = case.dtensors()
    local = tensors[3]._local_tensor.clone()
    local[1, 2] += 1
    tensors[3]._local_tensor = local
    folder = MemoryStorage()
    for rank in sorted(tensors):
        put(folder, f"model_world_size_4_rank_{rank}.pt", archive({"w": tensors[rank]}))
    (found,) = st.check_replicas(folder)
    assert found.values is not None and (found.box, found.values.first) == ("[3:5, 0:3]", (4, 2))
    assert ([*map(rank_of, found.holders)], [*map(rank_of, found.than)]) == ([3], [1])


# Megatron-Core's: groups of data-parallel ranks have the states of what isn't cut over tensor-parallel ones


def buckets(change: Callable[[Job], None], step: float = 3.0) -> MemoryStorage:
    """Return a checkpoint of two tensor-parallel ranks, whose second has states of its own."""
    job, other, folder = Job(layer_kinds(16), tp=2), Job(layer_kinds(16), tp=2), MemoryStorage()
    change(other)
    second = [shard for shard in other.shards() if "dp_group_idx_1" in shard.key]
    first = [shard for shard in job.shards() if "dp_group_idx_1" not in shard.key]
    objects = [
        st.ShardedObject(
            f"optimizer.distributed.dp_group_idx_{rank}.optimizer", {"param_groups": [{"step": at}]}, (1,), (0,)
        )
        for rank, at in enumerate((3.0, step))
    ]
    tree = {"shards": [*first, *second, *objects]}
    st.save(tree, folder, sharded_strategy=("torch_dist", 1), common_strategy=("torch", 1))
    return folder


NORM = "decoder.layers.mlp.linear_fc1.layer_norm_weight"


@pytest.mark.parametrize("state", ["exp_avg", "param"])
def test_states_of_megatron_s_groups_that_drifted_are_told_and_refused(state: str) -> None:
    def change(job: Job) -> None:
        bits = job.truth[f"optimizer.state.{state}.{NORM}"].view(torch.int32)
        bits[1, 5] += 2

    (found,) = st.check_replicas(buckets(change))
    assert (found.key, found.box) == (f"optimizer.state.{state}.{NORM}", "[1:2, 0:16]")
    assert (found.holders, found.than) == (
        ("optimizer.distributed.dp_group_idx_1",),
        ("optimizer.distributed.dp_group_idx_0",),
    )
    assert found.values is not None
    assert (found.values.first, found.values.count, found.values.ulps) == ((1, 5), 1, 2)
    with pytest.raises(CorruptCheckpoint, match=r"copies of optimizer states differ\n.*\n.*check_replicas shows"):
        list(st.open_checkpoint(buckets(change)))


def test_steps_of_megatron_s_groups_are_compared() -> None:
    assert st.check_replicas(buckets(lambda job: None)) == ()
    (found,) = st.check_replicas(buckets(lambda job: None, step=4.0))
    assert found.key == "optimizer.state.step" and "dp_group_idx_1" in str(found.holders)
    assert found.values is not None and (found.values.left, found.values.right) == (3.0, 4.0)


# No false alarm


REAL = ["deepspeed_zero1_dp2", "deepspeed_zero3_dp4", "deepspeed_round_robin", "deepspeed_universal"]
REAL += ["deepspeed_universal/global_step3_universal", "dtensor_fsdp2_w4", "megatron_0161_tp2"]
REAL += ["megatron_0140_torch_dist_flat", "megatron_0161_dp_reshardable_tp2dp2/checkpoint", "megatron_old_zarr"]


@pytest.mark.parametrize("name", REAL)
def test_what_other_programs_saved_is_equal(name: str) -> None:
    assert st.check_replicas(FIXTURES / name) == ()

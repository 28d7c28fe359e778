"""DeepSpeed's ZeRO-1, 2 and 3 open as they are: masters, moments and weights, in any layout, whatever was cut how."""

from __future__ import annotations

import dataclasses
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import CorruptCheckpoint, NotACheckpoint, UnsupportedValue
from shardtree.formats.deepspeed import _flat
from shardtree.storage import MemoryStorage
from shardtree.strategies import LoadOptions
from tests.formats.optimizer_formats import FIXTURES, LAYOUTS, truth, wrong_in_layout
from tests.formats.zero_folders import Save, folder_of, model_file, optimizer_file, put, saves
from tests.shell.table.folders import archive

NAMES = ("deepspeed_zero1_dp2", "deepspeed_zero3_dp4")
DECAYED = ["emb.weight", *(f"layers.{n}.fc{m}.weight" for n in range(2) for m in (1, 2))]
REST = ["gain", *(f"layers.{n}.fc{m}.bias" for n in range(2) for m in (1, 2)), "norm.weight", "norm.bias"]


def expected(name: str) -> dict[str, torch.Tensor]:
    tensors, _ = truth(name)
    step = tensors.pop("optimizer.state.step.")
    tied = {"head.weight": tensors["emb.weight"]}
    return tensors | tied | {f"optimizer.state.step.{one}": step for one in (*DECAYED, *REST)}


# Real folders


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_what_the_engine_had(name: str) -> None:
    found = st.load_plain_tensors(FIXTURES / name)
    known = expected(name)
    assert found.keys() == known.keys()
    assert [
        key for key, one in known.items() if not torch.equal(found[key], one) or found[key].dtype != one.dtype
    ] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_optimizer_resumes(name: str) -> None:
    """Its states are asked for by the checkpoint's metadata alone."""
    known, folder = expected(name), FIXTURES / name
    params = {one: torch.nn.Parameter(torch.zeros(known[one].shape)) for one in (*DECAYED, *REST)}
    optimizer = torch.optim.AdamW([{"params": [params[one] for one in group]} for group in (DECAYED, REST)])
    shards = {one: st.ShardedTensor.from_rank_offsets(one, param) for one, param in params.items()}
    ids = st.optim.get_param_id_to_sharded_param_map(shards, optimizer)
    fresh, metadata = optimizer.state_dict(), st.load_sharded_metadata(folder)
    target = st.optim.abstract_optim_state_from_metadata(fresh, ids, metadata, exclude_keys=["param"])
    loaded = st.load({"optimizer": target}, folder)
    optimizer.load_state_dict(st.optim.sharding_state_to_optim_state(loaded["optimizer"]))
    for one, param in params.items():
        for state in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(optimizer.state[param][state], known[f"optimizer.state.{state}.{one}"]), (state, one)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


@pytest.mark.parametrize("name", NAMES)
def test_the_common_state_is_what_the_caller_and_deepspeed_put_beside(name: str) -> None:
    common = st.open_checkpoint(FIXTURES / name).common()
    assert common["note"] == {"seed": 0, "loader": [1, 2]} and common["lr_scheduler"] == {"last_batch_iteration": 2}
    assert common["zero"]["loss_scaler"] == {"cur_scale": 1.0, "dynamic": False}
    assert "params" not in common["optimizer"]["param_groups"][0]


def test_a_tag_s_own_folder_opens() -> None:
    assert "emb.weight" in st.open_checkpoint(FIXTURES / NAMES[0] / "global_step3")


# Any save


def wrong_tensors(save: Save, folder: MemoryStorage | None = None) -> list[str]:
    found = st.load_plain_tensors(folder_of(save) if folder is None else folder)
    known = save.expected()
    assert found.keys() == known.keys()
    return [key for key, tensor in known.items() if not torch.equal(found[key], tensor)]


@given(saves())
def test_whatever_was_saved_how_loads_whole(save: Save) -> None:
    assert wrong_tensors(save) == []


@pytest.mark.slow
@given(saves(), some.sampled_from(LAYOUTS))
def test_whatever_was_saved_loads_in_any_layout(save: Save, layout: str) -> None:
    known = {key: tensor for key, tensor in save.expected().items() if tensor.ndim}
    assert wrong_in_layout(folder_of(save), known, layout) == []


SAVE = Save([{"a": (5, 3), "b": (4,), "c": (2, 2)}, {"d": (7,), "e": ()}], ranks=3)


def test_the_law_catches_parameters_in_the_order_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = _flat.group_pieces
    broken = lambda key, params, vectors: kept(key, sorted(params), vectors)  # noqa: E731
    monkeypatch.setattr("shardtree.formats.deepspeed._contents.group_pieces", broken)
    with pytest.raises(CorruptCheckpoint, match="that rounds to another value than the weight"):
        wrong_tensors(dataclasses.replace(SAVE, ranks=2, order="round robin"))


def test_the_law_catches_zero3_cut_as_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardtree.formats.deepspeed._contents.split_pieces", _flat.group_pieces)
    assert wrong_tensors(dataclasses.replace(SAVE, stage=3)) != []


# Files of other ranks, other saves, other steps


def with_optimizers(save: Save, order: list[int]) -> MemoryStorage:
    """Return a folder where each rank's optimizer file is another rank's."""
    storage = folder_of(save)
    for rank, other in enumerate(order):
        storage.replace(OPTIMIZER.format(rank), archive(optimizer_file(save, other)), durable=False)
    return storage


@given(some.lists(some.integers(0, 2), min_size=3, max_size=3))
def test_a_permuted_or_copied_rank_file_is_refused(order: list[int]) -> None:
    assume(order != [0, 1, 2])
    folder = with_optimizers(SAVE, order)
    with pytest.raises(CorruptCheckpoint):
        st.load_plain_tensors(folder)


def test_a_moment_is_refused_by_the_master_beside_it_and_the_file_is_named() -> None:
    folder = with_optimizers(SAVE, [1, 0, 2])
    target = st.load_tensors_metadata(folder)
    with pytest.raises(CorruptCheckpoint, match=r"rank_0_.*optim_states.pt' is not the file that was saved with these"):
        st.load({"m": target["optimizer.state.exp_avg.a"]}, folder)
    assert "is not the file" in str(st.verify(folder, report=lambda found: None)[0])
    assert st.load({"w": target["c"]}, folder)["w"].shape == (2, 2)  # weights need no masters


def test_an_edited_weight_is_refused_once_a_state_of_it_is_read() -> None:
    folder, file = folder_of(SAVE), model_file(SAVE, 0)
    file["module"]["d"][6] += 1
    folder.replace("step_3/mp_rank_00_model_states.pt", archive(file), durable=False)
    with pytest.raises(CorruptCheckpoint, match=r"a master weight of 'd' .*, at element 6"):
        st.load_plain_tensors(folder)
    assert "d" in st.load_plain_tensors(folder, options=LoadOptions(verify=None))


def test_a_copied_file_of_zero3_is_refused() -> None:
    with pytest.raises(CorruptCheckpoint, match=r"rank_2_.*' is a copy of .*rank_1_"):
        st.open_checkpoint(with_optimizers(dataclasses.replace(SAVE, stage=3), [0, 1, 1]))


class Constant(Save):
    """Masters that are constant in each parameter, so that ranks' parts of them are equal, and moments that aren't."""

    def state(self, state: str) -> dict[str, torch.Tensor]:
        found = super().state(state)
        if state != "param":
            return found
        return {name: torch.full_like(value, number) for number, (name, value) in enumerate(found.items())}


def test_ranks_of_zero3_with_equal_masters_and_other_moments_are_no_copies() -> None:
    shapes = dict.fromkeys("abcd", (4, 4))
    save = Constant([shapes], ranks=2, stage=3)
    assert wrong_tensors(save) == []


@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_a_permuted_file_of_zero3_is_refused_by_the_padding_in_its_moments(order: tuple[int, ...]) -> None:
    folder = with_optimizers(dataclasses.replace(SAVE, stage=3), [*order])
    if order == (0, 1, 2):
        assert st.load_plain_tensors(folder).keys() == SAVE.expected().keys()
        return
    assert len(st.load_plain_tensors(folder, options=LoadOptions(verify=None))) == len(SAVE.expected())
    with pytest.raises(CorruptCheckpoint, match=r"rank_\d.* seems to be another rank's file\n.* and zeros at the same"):
        st.load_plain_tensors(folder)
    assert "seems to be another rank's file" in str(st.verify(folder, report=lambda found: None)[0])


def test_padding_that_decay_has_filled_tells_nothing() -> None:
    assert wrong_tensors(dataclasses.replace(SAVE, stage=3, pad=9.0)) == []


OPTIMIZER = "step_3/bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
LACKING = r"lacks the optim_states|does not have one optimizer file"
MODEL = "step_3/zero_pp_rank_2_mp_rank_00_model_states.pt"


@pytest.mark.parametrize(
    ("stage", "file", "said"),
    [
        *((stage, OPTIMIZER.format(rank), LACKING) for stage in (1, 3) for rank in range(3)),
        (3, MODEL, r"does not have one model file for each rank\n  found 2 files, expected 3"),
    ],
)
def test_a_missing_file_is_refused(stage: int, file: str, said: str) -> None:
    folder = folder_of(dataclasses.replace(SAVE, stage=stage))
    folder.remove(file)
    with pytest.raises(CorruptCheckpoint, match=said):
        st.open_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (OPTIMIZER.format(3), "found 4 files, expected 3, as partition_count"),
        ("step_3/zero_pp_rank_0_mp_rank_00_optim_states.pt", "has files of two saves"),
    ],
)
def test_files_of_a_larger_world_or_another_save_beside_are_refused(name: str, said: str) -> None:
    folder = folder_of(SAVE)
    put(folder, name, archive(optimizer_file(SAVE, 0)))
    with pytest.raises(CorruptCheckpoint, match=said):
        st.open_checkpoint(folder)


UNJOINABLE = {
    "mp_rank_01_model_states.pt": "tensor parallelism",
    "zero_pp_rank_0_mp_rank_01_optim_states.pt": "tensor parallelism",
    "layer_03-model_00-model_states.pt": "a pipeline",
    "layer_0_expert_1_mp_rank_00_model_states.pt": "an expert",
    "expp_rank_0_mp_rank_00_optim_states.pt": "experts",
}


@pytest.mark.parametrize("name", UNJOINABLE)
def test_what_files_do_not_say_how_to_join_is_refused_by_name(name: str) -> None:
    folder = folder_of(SAVE)
    put(folder, f"step_3/{name}", b"")
    with pytest.raises(UnsupportedValue, match=rf"{name}': .*{UNJOINABLE[name]}"):
        st.open_checkpoint(folder)


def test_a_latest_that_names_nothing_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(NotACheckpoint):
        st.open_checkpoint(tmp_path)


# What is once in a file, and what isn't a number for each element


def with_inner(change: Any, save: Save = SAVE) -> MemoryStorage:
    folder = folder_of(save)
    for rank in range(save.ranks):
        file = optimizer_file(save, rank)
        change(file["optimizer_state_dict"])
        folder.replace(OPTIMIZER.format(rank), archive(file), durable=False)
    return folder


def step_in_group(inner: dict[str, Any]) -> None:
    for number, group in enumerate(inner["base_optimizer_state"]["param_groups"]):
        group["step"] = 5 + number
        del inner["base_optimizer_state"]["state"][number]["step"]


def test_a_step_in_the_group_is_each_parameter_s() -> None:
    found = st.load_plain_tensors(with_inner(step_in_group))
    assert found["optimizer.state.step.c"].item() == 5 and found["optimizer.state.step.e"].item() == 6


def factored(inner: dict[str, Any]) -> None:
    for one in inner["base_optimizer_state"]["state"].values():
        one["row"] = torch.ones(2, 3)


def test_a_state_that_is_the_group_s_is_refused_by_name() -> None:
    folder = with_inner(factored)
    with pytest.raises(UnsupportedValue, match=r"'optimizer.state.row.a': the group has one value of shape \(2, 3\)"):
        st.load_plain_tensors(folder)
    assert wrong_in_layout(folder, {"c": SAVE.expected()["c"]}, "rows") == []


def test_frozen_parameters_buffers_and_tied_names_of_zero3() -> None:
    save = dataclasses.replace(SAVE, stage=3)
    folder, frozen = folder_of(save), torch.arange(7.0)
    for rank in range(3):
        file = model_file(save, rank)
        file["module"] |= {"ice": torch.empty(0), "tied": torch.empty(0, dtype=torch.bfloat16), "seen": torch.tensor(4)}
        padded = torch.cat([frozen, torch.zeros(2)])
        file |= {
            "frozen_param_shapes": {"ice": torch.Size([7])},
            "frozen_param_fragments": {"ice": padded[3 * rank :][:3]},
        }
        file["shared_params"] = {"tied": "a"} if rank == 0 else {}
        folder.replace(f"step_3/zero_pp_rank_{rank}_mp_rank_00_model_states.pt", archive(file), durable=False)
    found = st.load_plain_tensors(folder)
    assert torch.equal(found["ice"], frozen) and found["seen"].item() == 4 and torch.equal(found["tied"], found["a"])


def test_a_step_that_no_float_holds_is_refused_by_name() -> None:
    def change(inner: dict[str, Any]) -> None:
        step_in_group(inner)
        inner["base_optimizer_state"]["param_groups"][0]["step"] = 10**400

    with pytest.raises(UnsupportedValue, match="a number that float32 cannot hold"):
        st.load_plain_tensors(with_inner(change))

"""A checkpoint of any format is written as DeepSpeed's Universal Checkpoint, and is the same when it is read back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given

import shardtree as st
from shardtree.errors import AlreadyACheckpoint, KeyMismatch, UnsupportedValue
from shardtree.interop import deepspeed
from shardtree.interop.deepspeed import save_universal
from shardtree.storage import MemoryStorage
from tests.formats.optimizer_formats import FIXTURES
from tests.formats.test_deepspeed import SAVE
from tests.formats.zero_folders import Save, folder_of, saves

REAL = FIXTURES / "deepspeed_universal"
STORED = ["deepspeed_zero1_dp2", "deepspeed_zero3_dp4", "deepspeed_round_robin", "deepspeed_universal"]


def written(source: Any, **options: Any) -> MemoryStorage:
    folder = MemoryStorage()
    save_universal(st.open_checkpoint(source), folder, **options)
    return folder


def wrong_tensors(source: Any, folder: Any) -> list[str]:
    known, found = st.load_plain_tensors(source), st.load_plain_tensors(folder)
    assert found.keys() == known.keys()
    return [key for key, one in known.items() if found[key].dtype != one.dtype or not torch.equal(found[key], one)]


def saved(tree: Mapping[str, Any]) -> MemoryStorage:
    folder = MemoryStorage()
    made = st.ShardedTensor.from_rank_offsets
    st.save({key: made(key, one) if isinstance(one, torch.Tensor) else one for key, one in tree.items()}, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", STORED)
def test_a_real_checkpoint_is_the_same_when_it_is_read_back(name: str) -> None:
    folder = written(FIXTURES / name)
    assert wrong_tensors(FIXTURES / name, folder) == []
    known, found = (st.open_checkpoint(place).common() for place in (FIXTURES / name, folder))
    assert {key: found[key] for key in known} == known


def test_for_zero3_the_model_file_has_the_name_that_it_looks_for() -> None:
    folder = written(REAL, stage=3)
    assert "zero_pp_rank_0_mp_rank_00_model_states.pt" in folder.names("universal")
    assert wrong_tensors(REAL, folder) == []


@pytest.mark.slow
@given(saves())
def test_whatever_was_saved_is_the_same_when_it_is_read_back(save: Save) -> None:
    source = folder_of(save)
    assert wrong_tensors(source, written(source)) == []


def test_the_law_catches_a_moment_in_the_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = deepspeed._stream
    swapped = lambda checkpoint, key, *dtype: kept(checkpoint, key.replace("exp_avg_sq", "exp_avg"), *dtype)  # noqa: E731
    monkeypatch.setattr(deepspeed, "_stream", swapped)
    source = folder_of(SAVE)
    assert wrong_tensors(source, written(source)) != []


def files_of(folder: Path) -> dict[str, Any]:
    """Return the values of the parameters' files, by place."""
    files = folder.glob("zero/*/*.pt")
    return {f"{file.parent.name}/{file.name}": torch.load(file, weights_only=True) for file in files}


def test_the_files_are_those_of_deepspeed_s_own_conversion(tmp_path: Path) -> None:
    save_universal(st.open_checkpoint(REAL), tmp_path, tag="ours")
    ours, theirs = files_of(tmp_path / "ours"), files_of(REAL / "global_step3_universal")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if not isinstance(value, dict):
            assert torch.equal(ours[name], value)
        else:
            assert ours[name].keys() == value.keys() and torch.equal(ours[name]["param"], value["param"])
    assert (tmp_path / "latest_universal").read_text() == "ours"
    model = torch.load(tmp_path / "ours" / "mp_rank_00_model_states.pt", weights_only=True)
    real = torch.load(REAL / "global_step3" / "mp_rank_00_model_states.pt", weights_only=True)
    assert real.keys() <= model.keys() | {"checkpoint_parallel_dimensions"}
    assert all(torch.equal(model["module"][name], tensor) for name, tensor in real["module"].items())


def test_what_an_own_save_has_becomes_states_with_masters_and_one_step() -> None:
    tree = {"w": torch.ones(2, dtype=torch.bfloat16), "optimizer.state.exp_avg.w": torch.zeros(2)}
    folder = written(saved({**tree, "optimizer": {"param_groups": [{"lr": 0.1, "step": 4}]}, "iteration": 9}))
    found = st.load_plain_tensors(folder)
    assert torch.equal(found["optimizer.state.param.w"], torch.ones(2)) and found["optimizer.state.step.w"] == 4
    common = st.open_checkpoint(folder).common()
    assert common["iteration"] == 9 and common["optimizer"] == {"param_groups": [{"lr": 0.1, "step": 4}]}


def test_groups_of_parameters_are_written_as_they_are_given() -> None:
    folder = written(folder_of(SAVE), parameter_groups=[["a", "b", "c"], ["e", "d"]])
    st.open_checkpoint(folder)["a"].data.read()
    with pytest.raises(KeyMismatch, match="each trained parameter once\n  'b'"):
        written(folder_of(SAVE), parameter_groups=[["a"]])


@pytest.mark.parametrize(
    ("tree", "error", "match"),
    [
        ({"optimizer.state.exp_avg.v": torch.ones(2)}, KeyMismatch, "there is no parameter 'v'"),
        ({"optimizer.buckets": torch.ones(2)}, KeyMismatch, "not a tensor of the model"),
        ({"rng": st.ShardedObject("rng", 5, (1,), (0,))}, KeyMismatch, "'rng/shard_0_1'"),
        ({"a/b": torch.ones(2)}, UnsupportedValue, "'a/b'"),
        ({"optimizer": {"scaler": 1}}, UnsupportedValue, "'optimizer' with the keys 'scaler'"),
    ],
)
def test_what_has_no_place_is_refused_by_name(tree: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        written(saved({"w": torch.ones(2), **tree}))


def test_what_is_named_is_left_out() -> None:
    source = saved({"w": torch.ones(2), "rng": st.ShardedObject("rng", 5, (1,), (0,))})
    assert list(st.open_checkpoint(written(source, leave_out=["rng/*"]))) == ["w"]


def test_a_checkpoint_isn_t_replaced_and_a_call_that_was_cut_off_is_gone_on_with() -> None:
    folder = written(folder_of(SAVE))
    with pytest.raises(AlreadyACheckpoint):
        save_universal(st.open_checkpoint(folder_of(SAVE)), folder)
    folder.remove("latest_universal")
    save_universal(st.open_checkpoint(folder_of(SAVE)), folder)
    assert wrong_tensors(folder_of(SAVE), folder) == []

"""DeepSpeed's Universal Checkpoint opens as it is: states by their folders, weights and buffers by the model file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import CorruptCheckpoint
from tests.formats.optimizer_formats import FIXTURES
from tests.formats.test_deepspeed import SAVE, wrong_tensors
from tests.formats.zero_folders import Save, saves, universal_of
from tests.shell.table.folders import archive

REAL = FIXTURES / "deepspeed_universal"


@given(saves(), some.booleans())
def test_whatever_was_converted_loads_whole(save: Save, is_flat: bool) -> None:
    assert wrong_tensors(save, universal_of(save, is_flat=is_flat)) == []


def test_where_both_lie_the_folder_opens_as_the_one_that_was_saved() -> None:
    assert st.open_checkpoint(REAL).checkpoint.fields["sharded_backend"] == "deepspeed"
    assert st.open_checkpoint(REAL / "global_step3_universal").checkpoint.fields["sharded_backend"] == "universal"


def test_states_without_the_rows_that_pad_a_vocabulary_have_fewer_rows() -> None:
    folder = universal_of(SAVE)
    cut = {"param": torch.ones(4, 3), "cat_dim": 0, "vocab_tensor": True}
    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        folder.replace(f"zero/a/{state}.pt", archive(cut), durable=False)
    found = st.load_tensors_metadata(folder)
    assert found["a"].global_shape == (5, 3) and found["optimizer.state.exp_avg.a"].global_shape == (4, 3)


def test_a_state_of_another_shape_is_refused() -> None:
    folder = universal_of(SAVE)
    folder.replace("zero/a/exp_avg.pt", archive({"param": torch.ones(3, 5)}), durable=False)
    with pytest.raises(
        CorruptCheckpoint, match=r"exp_avg.pt' does not have its parameter's shape\n  found a tensor of shape \(3, 5\)"
    ):
        st.open_checkpoint(folder)


def test_states_of_another_parameter_are_refused_as_they_are_read() -> None:
    folder = universal_of(Save([{"a": (4,), "b": (4,)}]))
    folder.replace("zero/a/fp32.pt", folder.read("zero/b/fp32.pt"), durable=False)
    with pytest.raises(CorruptCheckpoint, match=r"zero/a/fp32.pt' is not the file that was saved with these weights"):
        st.load_plain_tensors(folder)


def test_a_missing_parameter_is_named() -> None:
    folder = universal_of(SAVE)
    for name in folder.names("zero/d"):
        folder.remove(f"zero/d/{name}")
    lacks = r"lacks fp32 master weights of parameters that '.*_model_states.pt' lists\n  'zero/d/fp32.pt'"
    with pytest.raises(CorruptCheckpoint, match=lacks):
        st.open_checkpoint(folder)


def test_a_root_opens_by_its_latest_universal(tmp_path: Path) -> None:
    root = shutil.copytree(REAL, tmp_path / "root")
    (root / "latest").unlink()
    assert st.open_checkpoint(root).checkpoint.fields["sharded_backend"] == "universal"

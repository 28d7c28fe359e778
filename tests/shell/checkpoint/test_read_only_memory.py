"""Donated tensors in memory that is mapped for reading alone: an error names their keys, and no file."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import shardtree as st
from shardtree.core.mapping import _read_only
from shardtree.errors import ShapeError, StorageError
from tests.formats.test_overwrite_formats import FORMATS

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems are not asked"),
    pytest.mark.filterwarnings("ignore:The given (buffer|NumPy array) is not writable"),
]
WHY = r"donated tensors are in memory that cannot be written\n  'w'\n"


def read_only(count: int = 4) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, 4 * count, prot=mmap.PROT_READ), dtype=torch.float32)


def shard(data: torch.Tensor) -> st.ShardedTensor:
    return st.ShardedTensor.from_rank_offsets("w", data)


def saved(folder: Path, form: str = "native") -> Path:
    st.save(
        {"w": shard(torch.arange(4.0)), "b": st.ShardedTensor.from_rank_offsets("b", torch.ones(2))},
        folder,
        *FORMATS[form],
    )
    return folder


@pytest.mark.parametrize("form", FORMATS)
def test_a_load_names_the_key_before_it_reads(form: str, tmp_path: Path) -> None:
    place, own = saved(tmp_path / "step", form), torch.zeros(2)
    target = {"b": st.ShardedTensor.from_rank_offsets("b", own), "w": shard(read_only())}
    with pytest.raises(ShapeError, match=f"load: {WHY}"):
        st.load(target, place, donate=True)
    assert own.tolist() == [0.0, 0.0]
    assert st.load(target, place)["w"].tolist() == [0.0, 1.0, 2.0, 3.0]  # without donate it is only looked at


def test_where_a_copy_would_end_the_process_it_is_an_error_too(tmp_path: Path) -> None:
    place = saved(tmp_path / "step")
    memory = read_only(2).view(torch.bfloat16)
    with pytest.raises(ShapeError, match=f"load: {WHY}"):
        st.load({"w": shard(memory)}, place, donate=True, cast=True)
    strided = read_only(8)[::2]
    with pytest.raises(ShapeError, match=f"load: {WHY}"):
        st.load({"w": shard(strided)}, place, donate=True)
    halves = st.ShardedTensorFactory(
        "w", read_only(), lambda _, data, *rest: {"w": shard(data * 1)}, lambda tree: tree["w"]
    )
    with pytest.raises(ShapeError, match=f"load: {WHY}"):
        st.load({"w": halves}, place, donate=True)
    with pytest.raises(ShapeError, match=f"redistribute: {WHY}"):
        st.redistribute({"w": shard(torch.ones(4))}, {"w": shard(read_only())}, donate=True)
    with pytest.raises(ShapeError, match=f"redistribute: {WHY}"):
        st.redistribute({"w": shard(torch.ones(4))}, {"w": halves}, donate=True)


def test_a_file_that_is_mapped_for_reading_stays_as_it_is_and_one_for_writing_is_filled(tmp_path: Path) -> None:
    place, file = saved(tmp_path / "step"), tmp_path / "weights"
    np.zeros(4, np.float32).tofile(file)
    with pytest.raises(ShapeError, match=WHY):
        st.load({"w": shard(torch.from_numpy(np.memmap(file, np.float32, "r")))}, place, donate=True)
    assert not np.fromfile(file, np.float32).any()
    for mode in ("c", "r+"):
        mapped = torch.from_numpy(np.memmap(file, np.float32, mode))
        assert st.load({"w": shard(mapped)}, place, donate=True)["w"] is mapped
        assert mapped.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert np.fromfile(file, np.float32).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_explain_says_so_and_looking_changes_nothing(tmp_path: Path) -> None:
    place = saved(tmp_path / "step")
    said = st.explain({"w": shard(read_only())}, place, donate=True)
    assert not said.ok and "load: donated tensors are in memory that cannot be written" in str(said)
    array = np.arange(4, dtype=np.float32)
    assert st.explain({"w": shard(torch.from_numpy(array))}, place, donate=True).ok
    assert array.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_where_the_system_cant_be_asked_the_read_blames_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_read_only, "_futex", lambda: None)
    with pytest.raises(StorageError, match=r"at byte \d+ into memory that cannot be written"):
        st.load({"w": shard(read_only())}, saved(tmp_path / "step"), donate=True)

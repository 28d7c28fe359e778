"""Lightning's meta.pt beside files of torch.distributed.checkpoint is common state, or a clear error."""

from __future__ import annotations

import enum
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import shardtree as st
from shardtree.errors import CorruptCheckpoint, StrategyError, UnsafeFile
from tests.shell.table.folders import archive

META: dict[str, Any] = {
    "epoch": 3,
    "global_step": 300,
    "pytorch-lightning_version": "2.5.0",
    "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 4}}}},
    "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.5)}},
    "lr_schedulers": [{"base_lrs": [0.1], "last_epoch": 3}],
    "hyper_parameters": {"width": 8},
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lightning") / "step"
    state = {"model": {"w": torch.arange(4.0)}, "optimizer_0": {"param_groups": [{"lr": 0.1}]}}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dcp.save(state, checkpoint_id=folder)
    finally:
        dist.destroy_process_group()
    (folder / "meta.pt").write_bytes(archive(META))
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "step"))


def test_epoch_loops_and_schedulers_are_loaded_and_converted(folder: Path, tmp_path: Path) -> None:
    target = {"model": {"w": st.ShardedTensor.from_rank_offsets("model.w", torch.zeros(4))}}
    st.convert(folder, tmp_path / "native", backend=("safetensors", 1))
    st.convert(folder, tmp_path / "dcp", backend=("dcp", 1))
    for place in (folder, tmp_path / "native"):
        loaded = st.load(target, place)
        assert torch.equal(loaded["model"]["w"], torch.arange(4.0))
        assert loaded["optimizer_0"] == {"param_groups": [{"lr": 0.1}]}
        score = loaded["callbacks"].pop("ModelCheckpoint{'monitor': None}")["best_model_score"]
        assert score == 0.5
        assert {key: loaded[key] for key in META if key != "callbacks"} == {
            k: v for k, v in META.items() if k != "callbacks"
        }
    assert st.load_common_state_dict(tmp_path / "dcp")["lr_schedulers"] == META["lr_schedulers"]
    assert st.verify(folder) == ()


@pytest.mark.parametrize(
    "data",
    [b"", b"nonsense", archive(META)[:-200], archive(META)[:100], archive([1, 2]), archive(META | {"model": {}})],
    ids=["empty", "nonsense", "end cut off", "cut off", "a list", "a key of the index"],
)
def test_a_meta_file_that_is_not_sound_is_damage(data: bytes, folder: Path, tmp_path: Path) -> None:
    (folder / "meta.pt").write_bytes(data)
    for call in (st.load_common_state_dict, lambda at: st.convert(at, tmp_path / "copy", backend=("safetensors", 1))):
        with pytest.raises(CorruptCheckpoint, match=r"meta\.pt"):
            call(folder)
    assert "meta.pt" in {damage.file for damage in st.verify(folder)}


class Mode(enum.Enum):
    FAST = 1


def test_a_class_of_anybodys_is_not_made(folder: Path) -> None:
    (folder / "meta.pt").write_bytes(archive(META | {"hyper_parameters": Mode.FAST}))
    with pytest.raises(UnsafeFile, match=r"(?s)meta\.pt.*Mode.*allow_pickle"):
        st.load_common_state_dict(folder)
    assert st.load_common_state_dict(folder, options=st.LoadOptions(types=(Mode,)))["hyper_parameters"] is Mode.FAST
    assert st.verify(folder) == ()


def test_it_goes_with_its_checkpoint_and_is_never_anothers(folder: Path) -> None:
    shard = st.ShardedTensor.from_rank_offsets("w", torch.zeros(2))
    st.save({"w": shard, "step": 1}, folder, ("dcp", 1), overwrite=True)
    assert st.load_common_state_dict(folder) == {"step": 1}
    assert not (folder / "meta.pt").exists()
    left = folder.parent / "left"
    left.mkdir()
    (left / "meta.pt").write_bytes(archive(META))
    with pytest.raises(StrategyError, match=r"meta\.pt"):
        st.save({"w": shard, "step": 1}, left, ("dcp", 1))

"""Lightning's folders: DCP's files, and meta.pt with all else of the checkpoint, which is common state."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import shardtree as st
from shardtree.errors import CorruptCheckpoint, UnsafeFile

META = {
    "epoch": 3,
    "global_step": 120,
    "pytorch-lightning_version": "2.5.1",
    "loops": {"fit_loop": {"epoch_progress": {"current": {"ready": 3}}}},
    "callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(0.25)}},
    "lr_schedulers": [OrderedDict(base_lrs=[0.1], last_epoch=3)],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as FSDPStrategy with state_dict_type="sharded" writes it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        state = {
            "model": {"w": torch.arange(6.0).view(2, 3)},
            "optimizer_0": {"state": {"w": {"step": torch.tensor(5.0)}}},
        }
        dcp.save(state, checkpoint_id=tmp_path / "epoch=3")
    finally:
        dist.destroy_process_group()
    torch.save(META, tmp_path / "epoch=3" / "meta.pt")
    return tmp_path / "epoch=3"


def test_what_lightning_keeps_beside_the_tensors_is_common_state(folder: Path, tmp_path: Path) -> None:
    target: dict[str, Any] = {"model": {"w": torch.zeros(2, 3)}}
    loaded = st.load(target, folder)
    assert torch.equal(loaded["model"]["w"], torch.arange(6.0).view(2, 3))
    assert not st.diff({name: loaded[name] for name in META}, META)
    st.convert(folder, tmp_path / "native", backend="safetensors")
    assert not st.diff(st.load(target, tmp_path / "native"), loaded)
    assert not st.verify(folder)


def test_a_damaged_meta_file_is_damage_and_one_that_needs_code_is_unsafe(folder: Path) -> None:
    whole = (folder / "meta.pt").read_bytes()
    for data in (b"", whole[:-100], whole.replace(b"epoch", b"model", 1)):
        (folder / "meta.pt").write_bytes(data)
        with pytest.raises(CorruptCheckpoint, match="meta"):
            st.load_common_state_dict(folder)
        assert st.verify(folder)
    torch.save({**META, "hyper_parameters": Path}, folder / "meta.pt")
    with pytest.raises(UnsafeFile, match="meta"):
        st.load_common_state_dict(folder)
    torch.save({**META, "model": 1}, folder / "meta.pt")
    with pytest.raises(CorruptCheckpoint, match=r"meta\.pt doesn't go with the rest: model"):
        st.load_common_state_dict(folder)

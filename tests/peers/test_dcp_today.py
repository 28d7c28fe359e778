"""What torch.distributed.checkpoint of today writes beside its plain folders opens, or says why it doesn't."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat

import shardtree as st
from shardtree.errors import UnsupportedValue
from shardtree.quantised import FORMS, recode

hf_storage = pytest.importorskip("torch.distributed.checkpoint.hf_storage")
pytestmark = pytest.mark.peers
STATE = {"a.weight": torch.arange(12.0).reshape(3, 4), "b.weight": torch.ones(2, 2).bfloat16()}


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of DCP, about one process
        yield


def saved(place: Path, **options: Any) -> Path:
    dcp.save(STATE, storage_writer=hf_storage.HuggingFaceStorageWriter(path=str(place), **options), no_dist=True)
    return place


@pytest.mark.parametrize(
    "options",
    [
        {"fqn_to_index_mapping": {"a.weight": 1, "b.weight": 2}},
        {"save_distributed": True, "enable_consolidation": True},
        {
            "save_distributed": True,
            "enable_consolidation": True,
            "fqn_to_index_mapping": {"a.weight": 1, "b.weight": 2},
        },
    ],
    ids=["whole", "consolidated", "consolidated in two"],
)
def test_a_model_of_its_hugging_face_writer_opens(options: dict[str, Any], tmp_path: Path) -> None:
    found = st.load_plain_tensors(saved(tmp_path / "model", **options))
    assert found.keys() == STATE.keys()
    assert all(torch.equal(found[key], each) for key, each in STATE.items())


class Application:
    """A `Stateful`: DCP asks it for its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"w": torch.full((2,), 5.0), "n": 3, "bytes": io.BytesIO(b"hello")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def test_the_states_of_statefuls_and_bytes_are_what_they_were(tmp_path: Path) -> None:
    dcp.save({"app": Application(), "blob": io.BytesIO(b"xyz")}, checkpoint_id=tmp_path / "s", no_dist=True)
    common = st.load_common_state_dict(tmp_path / "s")
    assert (common["app"]["n"], common["app"]["bytes"].getvalue(), common["blob"].getvalue()) == (3, b"hello", b"xyz")
    assert st.load_plain_tensors(tmp_path / "s")["app.w"].tolist() == [5, 5]


def test_its_own_safetensors_files_are_refused_by_name(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path / "f", serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save(STATE, storage_writer=writer, no_dist=True)
    with pytest.raises((UnsupportedValue, st.errors.CorruptCheckpoint), match=r"a\.weight|safetensors|distcp"):
        st.load_plain_tensors(tmp_path / "f")


def test_quantised_weights_are_read_as_its_quantised_reader_reads_them(tmp_path: Path) -> None:
    reader = pytest.importorskip("torch.distributed.checkpoint.quantized_hf_storage").QuantizedHuggingFaceStorageReader
    torch.manual_seed(0)
    stored = FORMS["fp8_blocks"].quantise({"up.weight": torch.randn(200, 300)})
    whole = st.ShardedTensor.from_rank_offsets
    st.save({key: whole(key, each) for key, each in stored.items()}, tmp_path / "fp8", ("huggingface", 1))
    names = dict.fromkeys(stored, "model.safetensors")
    (tmp_path / "fp8" / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    theirs = {"up.weight": torch.zeros(200, 300)}
    dcp.load(theirs, storage_reader=reader(str(tmp_path / "fp8")), no_dist=True)
    st.convert(tmp_path / "fp8", tmp_path / "plain", backend="safetensors", transform=recode(torch.float32))
    assert torch.equal(st.load_plain_tensors(tmp_path / "plain")["up.weight"], theirs["up.weight"])

"""What is no checkpoint gets an error that says what it seems to be."""

from __future__ import annotations

import pytest
import torch

import shardtree as st
from shardtree.errors import CorruptCheckpoint, NotACheckpoint, StorageError
from shardtree.storage import MemoryStorage

FOLDERS = {
    "latest_checkpointed_iteration.txt": "such as iter_0000042",
    "common.pt": "an unfinished save of Megatron-Core",
    "mp_rank_00/model_optim_rng.pt": "before torch_dist",
    "__0.metadata": "use_collectives=False",
    "__0_0.distcp": "the save is unfinished",
    "model-00001-of-00002.safetensors": "download the index, too",
    ".zarray": "Pass the array's group",
    "pytorch_model.bin": "safe_serialization=True",
    "pytorch_model.bin.index.json": "pickled weights",
    "consolidated.00.pth": "pickled weights",
    "notes.txt": "in no format that is recognised",
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_called_what_it_seems_to_be(name: str) -> None:
    storage = MemoryStorage()
    storage.replace(name, b"", durable=False)
    storage.replace("config.json", b"{}", durable=False)
    with pytest.raises(NotACheckpoint, match=r"a folder without metadata\.json") as caught:
        st.open_checkpoint(storage)
    assert FOLDERS[name] in str(caught.value)


@pytest.mark.parametrize("backend", [("dcp", 1), ("huggingface", 1)], ids=str)
def test_a_metadata_file_of_another_program_is_let_be(backend: tuple[str, int]) -> None:
    storage = MemoryStorage()
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.arange(3))}, storage, backend)
    storage.replace("metadata.json", b'{"license": "mit"}', durable=False)
    assert st.is_checkpoint(storage)
    assert st.load_plain_tensors(storage)["w"].tolist() == [0, 1, 2]


def test_a_metadata_file_of_another_program_makes_no_checkpoint() -> None:
    storage = MemoryStorage()
    storage.replace("metadata.json", b'{"license": "mit"}', durable=False)
    assert not st.is_checkpoint(storage)
    with pytest.raises(StorageError, match="another program"):
        st.save({"step": 1}, storage, overwrite=True)
    assert storage.read("metadata.json") == b'{"license": "mit"}'
    with pytest.raises(CorruptCheckpoint, match="sharded_backend"):
        st.open_checkpoint(storage)

"""A conversion to the name of a .safetensors file writes that file, and nothing beside it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shardtree as st
from shardtree.errors import AlreadyACheckpoint, StorageError, UnsupportedValue
from shardtree.storage import LocalStorage
from tests.cli.checkpoints import run

WEIGHTS = {"base.lora_A": torch.arange(6.0).view(2, 3), "base.lora_B": torch.ones(3, dtype=torch.bfloat16)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tree = {key: st.ShardedTensor.from_rank_offsets(key, data) for key, data in WEIGHTS.items()}
    st.save(tree, tmp_path / "source")
    return tmp_path / "source"


def check(file: Path) -> None:
    """Check that the file alone is there, with all weights, for the safetensors library and as a source."""
    assert [path.name for path in file.parent.iterdir()] == [file.name] and file.is_file()
    found, again = load_file(file), st.load_plain_tensors(file)
    for key, data in WEIGHTS.items():
        assert torch.equal(found[key], data) and torch.equal(again[key], data)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "model.safetensors", "model-00001-of-00002.safetensors"])
def test_the_file_is_written(name: str, source: Path, tmp_path: Path) -> None:
    st.convert(source, tmp_path / "new" / name, backend="huggingface")
    check(tmp_path / "new" / name)


def test_in_the_shell_too(source: Path, tmp_path: Path) -> None:
    done = run("convert", source, tmp_path / "new" / "adapter_model.safetensors", "--to", "hf")
    assert done.exit_code == 0, done.stderr
    check(tmp_path / "new" / "adapter_model.safetensors")


def test_other_files_of_the_folder_stay(source: Path, tmp_path: Path) -> None:
    st.convert(source, tmp_path / "new", backend="huggingface")
    st.convert(source, tmp_path / "new" / "adapter_model.safetensors", backend="huggingface")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "adapter_model.safetensors",
        "model.safetensors",
    ]


@pytest.mark.parametrize("call", ["write_parts", "move", "remove_folder"])
@pytest.mark.parametrize("number", [0, 1])
def test_the_same_call_resumes(
    call: str, number: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, calls, real = tmp_path / "new" / "adapter_model.safetensors", [0], getattr(LocalStorage, call)

    def failing(self: LocalStorage, *arguments: Any, **keywords: Any) -> Any:
        calls[0] += 1
        if calls[0] == number + 1:
            raise StorageError("the disk is full")
        return real(self, *arguments, **keywords)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, call, failing)
        with suppress(StorageError):
            st.convert(source, file, backend="huggingface")
    if not file.exists():  # the file is there whole, or not at all
        st.convert(source, file, backend="huggingface")
    assert torch.equal(load_file(file)["base.lora_A"], WEIGHTS["base.lora_A"])


@pytest.mark.parametrize(
    ("name", "backends", "words"),
    [
        ("pytorch_model.bin", ("huggingface", None), "names a pickle, and none is written"),
        ("weights.pt", ("dcp", None), "names a pickle, and none is written"),
        ("model.safetensors", ("dcp", None), "names a file, and dcp is written as a folder"),
        ("model.safetensors", ("huggingface", "safetensors"), "names a file, and safetensors is written as a folder"),
    ],
)
def test_what_no_single_file_can_be_is_an_error(
    name: str, backends: tuple[str, str | None], words: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(StorageError, match=words):
        st.convert(source, tmp_path / "new" / name, backend=backends[0], common_backend=backends[1])
    assert not (tmp_path / "new").exists()


def test_a_file_that_is_there_stays(source: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"mine")
    with pytest.raises(AlreadyACheckpoint, match="is there already"):
        st.convert(source, tmp_path / "adapter_model.safetensors", backend="huggingface")
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == b"mine"


def test_a_common_state_is_refused_as_in_a_folder(tmp_path: Path) -> None:
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(2)), "step": 7}, tmp_path / "source")
    with pytest.raises(UnsupportedValue, match=r"tree\['step'\]"):
        st.convert(tmp_path / "source", tmp_path / "w.safetensors", backend="huggingface")
    assert not (tmp_path / "w.safetensors").exists()

"""A conversion to the name of a .safetensors file writes that file, and nothing beside it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shardtree as st
from shardtree.conversion._single import SingleFile
from shardtree.errors import AlreadyACheckpoint, StorageError
from shardtree.storage import LocalStorage
from shardtree.world import World, simulate
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


@pytest.mark.slow
@pytest.mark.parametrize("call", ["write_parts", "move", "remove", "remove_folder"])
@pytest.mark.parametrize("number", [0, 1, 2, 3])
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
    if not file.exists() or len([*file.parent.iterdir()]) > 1:
        st.convert(source, file, backend="huggingface", verify=False)
    check(file)


def left_behind(source: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a file, by a conversion that is killed when the file has its name."""

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
        patched.setattr("shardtree.conversion._convert.forget", killed)
        st.convert(source, file, backend="huggingface")
    assert sorted(path.name for path in file.parent.iterdir()) == [f".{file.name}.convert", file.name]


@pytest.mark.parametrize("change", ["other bytes", "other values", "another source"])
def test_a_file_that_another_program_has_written_since_stays(
    change: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "new" / "adapter_model.safetensors"
    left_behind(source, file, monkeypatch)
    if change == "another source":
        source = tmp_path / "another"
        st.save([st.ShardedTensor.from_rank_offsets("base.lora_A", torch.zeros(2, 3))], source)
    else:
        file.write_bytes(b"mine" if change == "other bytes" else file.read_bytes()[:-1] + b"!")
    before = file.read_bytes()
    with pytest.raises(AlreadyACheckpoint, match="exists already"):
        st.convert(source, file, backend="huggingface")
    assert file.read_bytes() == before


def test_ranks_finish_together_what_was_killed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "new" / "adapter_model.safetensors"
    left_behind(source, file, monkeypatch)
    simulate(2, lambda world: st.convert(source, file, backend="huggingface", world=world))
    check(file)


def test_a_limit_of_files_is_refused(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "new" / "adapter_model.safetensors"
    done = run("convert", source, file, "--to", "hf", "--max-file-size", "1MB")
    assert done.exit_code == 2 and "a single file cannot be written" in done.stderr and "--max-file-size" in done.stderr
    assert not file.parent.exists()


@pytest.mark.parametrize("backend", ["huggingface", "safetensors", "dcp"])
def test_a_save_to_a_folder_with_the_name_of_a_file_is_one(backend: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    st.save([st.ShardedTensor.from_rank_offsets("w", torch.ones(2))], tmp_path / "model.safetensors", backend)
    assert [*st.open_checkpoint(tmp_path / "model.safetensors")] == ["w"]


def test_a_file_that_is_there_stays(source: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"mine")
    with pytest.raises(AlreadyACheckpoint, match="exists already"):
        st.convert(source, tmp_path / "adapter_model.safetensors", backend="huggingface")
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == b"mine"


def made_meanwhile(file: Path) -> Callable[[Any], Any]:
    """Return a transform during which another program makes the file."""

    def transform(tree: Any) -> Any:
        file.write_bytes(b"mine")
        return tree

    return transform


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("verify", [True, False])
def test_a_file_that_another_program_makes_meanwhile_stays(
    ranks: int, verify: bool, source: Path, tmp_path: Path
) -> None:
    file = tmp_path / "new" / "adapter_model.safetensors"
    file.parent.mkdir()

    def convert(world: World, transform: Any) -> Any:
        return st.convert(source, file, backend="huggingface", transform=transform, verify=verify, world=world)

    with pytest.raises(AlreadyACheckpoint, match="exists already") as error:
        simulate(ranks, lambda world: convert(world, made_meanwhile(file)))
    assert file.read_bytes() == b"mine"
    if ranks == 1:
        assert "the same call moves it once that file is elsewhere" in error.value.__notes__[0]
    file.unlink()  # as the error advises, after a copy
    simulate(ranks, lambda world: convert(world, lambda tree: tree))
    check(file)


def test_what_another_conversion_has_not_moved_yet_is_kept_and_finished(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, other = tmp_path / "new" / "adapter_model.safetensors", tmp_path / "other"
    st.save([st.ShardedTensor.from_rank_offsets("base.lora_A", torch.zeros(2, 3))], other)

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
        patched.setattr(SingleFile, "put", killed)
        st.convert(source, file, backend="huggingface")
    with pytest.raises(AlreadyACheckpoint, match="Repeat that conversion to finish it") as error:
        st.convert(other, file, backend="huggingface")
    assert f".{file.name}.convert" in str(error.value)
    st.convert(source, file, backend="huggingface")  # as the error advises
    check(file)

"""A file that is cut before or while it is read is named, and never called replaced; one that a save replaces is."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import shardtree as st
from shardtree.errors import CheckpointingException, CheckpointReplaced, CorruptCheckpoint, StorageError
from shardtree.shell.storage._local_files import LocalReader
from shardtree.shell.table import _metadata
from shardtree.strategies import LoadOptions
from tests.faults.sampling import sample
from tests.fuzz import seeds
from tests.fuzz.seeds import Files, write_files

FORMATS: dict[str, Callable[[], Files]] = {  # cached: a save's folder has another name each time
    "deepspeed": cache(lambda: _known(seeds.deepspeed()[0])),
    "deepspeed, its own folder": cache(lambda: _in(seeds.deepspeed()[0])),
    "universal": cache(lambda: _in(seeds.universal()[0])),
    "dtensor_files": cache(lambda: _known(seeds.dtensor_files()[0])),
    "dcp": cache(lambda: seeds.dcp()[0]),
    "zarr": cache(lambda: seeds.saved(("zarr", 3))),
    "safetensors": cache(lambda: seeds.saved(("safetensors", 1))),
    "huggingface": cache(lambda: seeds.saved(("huggingface", 1))),
    "dcp_safetensors": cache(lambda: seeds.dcp_safetensors()[0]),
}


def _in(files: Files) -> Files:
    """Return a checkpoint of DeepSpeed without the file that names its folder: the files of models decide."""
    tag = files.get("latest", files.get("latest_universal", b"")).decode().strip()
    return {name.removeprefix(f"{tag}/"): data for name, data in _known(files).items() if not name.startswith("latest")}


def _known(files: Files) -> Files:
    """Return a checkpoint without what isn't the format's: what the tensors should be, folders of buffers."""
    return {name: data for name, data in files.items() if name != "truth.safetensors" and "zero/count/" not in name}


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size * 2 // 3)


def load(folder: Path) -> None:
    found = st.load_sharded_metadata(folder)
    st.load({key: shard for key, shard in found.items() if isinstance(shard, st.ShardedTensor)}, folder)


def verify(folder: Path) -> None:
    for damage in st.verify(folder):
        raise CorruptCheckpoint(f"{damage}: {damage.file} {damage.what}")


def load_and_verify(folder: Path) -> None:
    load(folder)
    verify(folder)


def load_plain(folder: Path) -> None:
    shapes = {key: shard.global_shape for key, shard in st.load_tensors_metadata(folder).items()}
    st.load_plain_tensors(folder, options=st.LoadOptions(shapes=shapes))  # a format may say none


READS = {"load": load, "verify": verify, "load_plain_tensors": load_plain, "fingerprint": st.fingerprint}


def opens(read: Callable[[Path], object], folder: Path, happens: Callable[[int], object]) -> int:
    """Read, with something that happens before each file is opened; return how many were."""
    enter, count = LocalReader.__enter__, 0

    def opened(reader: LocalReader) -> Any:
        nonlocal count
        happens(count)
        count += 1
        return enter(reader)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalReader, "__enter__", opened)
        read(folder)
    return count


def outcomes(name: str, file: str, read: Callable[[Path], object], folder: Path) -> list[CheckpointingException]:
    """Return what is raised where a file is cut right before one is opened, at some moments."""
    found: list[CheckpointingException] = []
    write_files(folder, FORMATS[name]())
    for moment in sample(range(opens(read, folder, lambda _: None)), 6):
        write_files(folder, FORMATS[name]())
        try:
            opens(read, folder, lambda count, moment=moment: count == moment and cut(folder / file))
        except CheckpointingException as error:
            found.append(error)
    return found


def chosen(name: str) -> list[str]:
    """Return some files of a checkpoint: the first of each kind, by its name's first letters and its end."""
    kinds = {(file.rpartition("/")[2][:3], file[-3:]): file for file in sorted(FORMATS[name](), reverse=True)}
    return [file for file in kinds.values() if not file.endswith("config.json")]


CASES = [(name, number) for name in FORMATS for number in range(len(chosen(name)))]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:verify")
@pytest.mark.parametrize(("name", "number"), CASES)
def test_a_file_that_is_cut_is_named_and_not_called_replaced(name: str, number: int, tmp_path: Path) -> None:
    file = chosen(name)[number]
    errors = [error for read in READS.values() for error in outcomes(name, file, read, tmp_path)]
    for error in errors:
        assert isinstance(error, (CorruptCheckpoint, StorageError)) or "not a checkpoint" in str(error), error
        assert not isinstance(error, CheckpointReplaced) and "replaced by a later save" not in str(error)
        assert file.rpartition("/")[2] in str(error) or file.startswith("latest"), error
    write_files(tmp_path, FORMATS[name]())
    cut(tmp_path / file)
    with pytest.raises(CheckpointingException) as caught:
        load_and_verify(tmp_path)
    assert not isinstance(caught.value, CheckpointReplaced)


def newer(file: Path) -> None:
    """Save anew: the same file, as a program writes it, of another time and length where its kind allows."""
    data = file.read_bytes()
    file.write_bytes(data + b" " if file.name == "latest" else data)
    os.utime(file, (1e9, 1e9))


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("deepspeed", "latest"),
        ("deepspeed, its own folder", "*_model_states.pt"),
        ("universal", "*_model_states.pt"),
        ("dtensor_files", "model_*_rank_0.pt"),
        ("dcp", ".metadata"),
        ("huggingface", "*.safetensors"),
        ("dcp_safetensors", "shard-00002-*.safetensors"),
    ],
)
def test_a_file_that_another_save_has_written_is_called_replaced(name: str, file: str, tmp_path: Path) -> None:
    write_files(tmp_path, FORMATS[name]())
    (place,) = sorted(tmp_path.glob(file))[:1]
    stored = st.load_tensors_metadata(tmp_path)
    told = LoadOptions(shapes={key: tensor.global_shape for key, tensor in stored.items()})
    opened = st.open_checkpoint(tmp_path, options=told)
    newer(place)
    key = next(key for key in opened if isinstance(opened[key], st.ShardedTensor))
    with pytest.raises(CheckpointReplaced):
        opened[key].data.read()
    newer_then_cut = st.open_checkpoint(tmp_path, options=told)
    cut(place)
    with pytest.raises((CorruptCheckpoint, StorageError)) as caught:
        newer_then_cut[key].data.read()
    assert place.name in str(caught.value)


def test_the_law_catches_whoever_calls_a_cut_file_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_metadata, "_is_whole", lambda storage, name: True)
    with pytest.raises(AssertionError):
        test_a_file_that_is_cut_is_named_and_not_called_replaced("dcp", chosen("dcp").index(".metadata"), tmp_path)

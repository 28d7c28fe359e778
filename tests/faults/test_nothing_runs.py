"""No entry point runs what a file brings: payloads that would make a folder, in each place that holds a pickle."""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import CheckpointingException
from tests.faults.entry_points import entry_points
from tests.shell.checkpoint.parts import FORMATS as BACKENDS

FIXTURES = Path(__file__).parents[1] / "fixtures"


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def saved(backend: tuple[str, int], *, in_object: bool, folder: Path, payload: Payload) -> None:
    """Save what only `allow_pickle=True` can save, as somebody hostile would."""
    weight = st.ShardedTensor.from_rank_offsets("w", torch.arange(4.0))
    held: Any = st.ShardedObject("o", payload, (1,), (0,)) if in_object else payload
    st.save({"w": weight, "held": held}, folder, backend, options=st.SaveOptions(allow_pickle=True, durable=False))


def dumped(name: str, fixture: str, folder: Path, payload: Payload) -> None:
    """Put a plain pickle in the place of a file of a checkpoint."""
    shutil.copytree(FIXTURES / fixture, folder)
    (folder / name).write_bytes(pickle.dumps(payload))


def archived(name: str, fixture: str, folder: Path, payload: Payload) -> None:
    """Put an archive of torch.save in the place of a file of a checkpoint."""
    shutil.copytree(FIXTURES / fixture, folder)
    torch.save(payload, folder / name)


PLACES: dict[str, Callable[[Path, Payload], None]] = {
    **{
        f"{backend[0]}, {'an object' if in_object else 'the common state'}": partial(
            lambda folder, payload, **how: saved(folder=folder, payload=payload, **how),
            backend=backend,
            in_object=in_object,
        )
        for backend in BACKENDS
        for in_object in (False, True)
    },
    ".metadata": partial(dumped, ".metadata", "megatron_0161_tp2"),
    "common.pt": partial(archived, "common.pt", "megatron_0161_tp2"),
    "old zarr, common.pt": partial(archived, "common.pt", "megatron_old_zarr"),
    "old zarr, an object": partial(archived, "layer._extra_state/shard_0_1.pt", "megatron_old_zarr"),
}


# The pickles of a real folder's file: each still gives the value that it gave, and makes a folder before that


def with_payload(content: bytes, marker: Path) -> bytes:
    """Return a pickle, or an archive of torch.save, whose pickle makes a folder before it goes on as it did."""
    if content[:1] == b"\x80":
        name = str(marker).encode()
        return content[:2] + b"cos\nmkdir\nX" + struct.pack("<I", len(name)) + name + b"\x85R0" + content[2:]
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            held = old.read(name)
            new.writestr(name, with_payload(held, marker) if name.endswith("/data.pkl") else held)
    return made.getvalue()


def planted(folder: Path, name: str, marker: Path) -> None:
    """Put the payload into a file with one pickle, or into all archives of a `.distcp` file."""
    path = folder / name
    if path.suffix != ".distcp":
        path.write_bytes(with_payload(path.read_bytes(), marker))
        return
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        if info.relative_path == name:
            changed = with_payload(path.read_bytes()[info.offset : info.offset + info.length], marker)
            metadata.storage_data[index] = replace(info, offset=path.stat().st_size, length=len(changed))
            path.write_bytes(path.read_bytes() + changed)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, 4))


OPTIMIZERS = (
    "megatron_0161_dp_reshardable_tp2dp2/checkpoint",
    "deepspeed_zero1_dp2",
    "deepspeed_zero3_dp4",
    "dtensor_fsdp2_w4",
)


def pickled(fixture: str) -> list[str]:
    """Return the files with pickles, those that say where others lie last."""
    folder = FIXTURES / fixture
    kinds = (".pt", ".distcp", ".metadata")
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.name.endswith(kinds)]
    return sorted(names, key=lambda name: (name == ".metadata", name))


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_no_entry_point_runs_what_a_file_brings(place: str, tmp_path: Path) -> None:
    folder, marker = tmp_path / "checkpoint", tmp_path / "marker"
    PLACES[place](folder, Payload(marker))
    refused = 0
    for name, call in entry_points(folder, tmp_path / "elsewhere"):
        try:
            call()
        except CheckpointingException:
            refused += 1
        assert not marker.exists(), name
    assert refused


FILES = [(fixture, name) for fixture in OPTIMIZERS for name in pickled(fixture)]


@pytest.mark.slow
@pytest.mark.parametrize(("fixture", "name"), FILES)
def test_no_entry_point_runs_what_a_file_of_an_optimizer_brings(fixture: str, name: str, tmp_path: Path) -> None:
    folder, marker = tmp_path / "checkpoint", tmp_path / "marker"
    shutil.copytree(FIXTURES / fixture, folder)
    planted(folder, name, marker)
    errors = []
    for way, call in entry_points(folder, tmp_path / "elsewhere"):
        try:
            call()
        except CheckpointingException as error:
            errors.append(str(error))
        assert not marker.exists(), way
    named = [error for error in errors if Path(name).name in error]
    assert named and any(re.search(r"(os|posix)\.mkdir", error) for error in named)


@pytest.mark.parametrize(("fixture", "name"), FILES)
def test_the_payloads_of_an_optimizer_would_run(fixture: str, name: str, tmp_path: Path) -> None:
    """The planted fault: Python unpickles the file, or the last archive in it."""
    folder, marker = tmp_path / "checkpoint", tmp_path / "marker"
    shutil.copytree(FIXTURES / fixture, folder)
    planted(folder, name, marker)
    content = (folder / name).read_bytes()
    if ".distcp" in name:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        content = content[max(info.offset for info in metadata.storage_data.values() if info.relative_path == name) :]
    with suppress(ModuleNotFoundError):  # DeepSpeed isn't here, and comes later in the pickle
        if name == ".metadata":
            pickle.loads(content)
        else:
            torch.load(io.BytesIO(content), weights_only=False)
    assert marker.exists()


def trust(folder: Path) -> None:
    """Read with leave to run what is there, all of it."""
    st.load_common_state_dict(folder, options=st.LoadOptions(allow_pickle=True))
    tree = st.open_checkpoint(folder, options=st.LoadOptions(allow_pickle=True))
    for key in tree:
        tree[key]


@pytest.mark.parametrize("place", PLACES)
def test_the_payloads_would_run(place: str, tmp_path: Path) -> None:
    """The planted fault: pickles are allowed, and the folder is made."""
    folder, marker = tmp_path / "checkpoint", tmp_path / "marker"
    PLACES[place](folder, Payload(marker))
    with suppress(CheckpointingException):  # what was run gave no metadata
        trust(folder)
    assert marker.exists()

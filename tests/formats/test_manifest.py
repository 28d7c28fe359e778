"""integrity.json, in which Megatron-Core keeps the SHA-256 of each file: verify checks it, and so do loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import CorruptCheckpoint
from tests.inspection.test_verify_flips import is_found
from tests.shell.table.folders import Files, flipped, folder_of

FIXTURE = Path(__file__).parents[1] / "fixtures" / "megatron_main202608_tp2"
NAME = "integrity.json"

PLAIN: Files = {path.name: path.read_bytes() for path in sorted(FIXTURE.iterdir())}


def manifest(contents: Files, **changes: Any) -> bytes:
    hashes = {name: sha256(data).hexdigest() for name, data in contents.items()}
    return json.dumps({"algorithm": "sha256", "files": hashes} | changes, indent=2).encode()


FILES: Files = PLAIN | {NAME: manifest(PLAIN)}
PADDING = PLAIN["__0_0.distcp"].index(b"FB") + 6


def test_the_law_catches_a_manifest_that_leaves_a_file_out() -> None:
    rest = {name: data for name, data in PLAIN.items() if name != "__0_0.distcp"}
    assert is_found(flipped(FILES, "__0_0.distcp", 8 * PADDING))
    assert not is_found(flipped(PLAIN | {NAME: manifest(rest)}, "__0_0.distcp", 8 * PADDING))


def unchecked(files: Files) -> tuple[st.strategies.Unchecked, ...]:
    reports: list[st.strategies.VerifyReport] = []
    assert st.verify(folder_of(files), report=reports.append) == ()
    return reports[0].unchecked


def test_a_file_that_it_does_not_list_is_said() -> None:
    assert [(one.file, one.why) for one in unchecked(FILES | {"notes.txt": b"lr"})] == [
        ("notes.txt", "integrity.json does not list it")
    ]


WRONG: dict[str, tuple[bytes, str, str]] = {
    "another algorithm": (manifest(PLAIN, algorithm="md5"), NAME, "'md5'"),
    "no algorithm": (b'{"files": {}}', NAME, "None"),
    "no files": (b'{"algorithm": "sha256"}', NAME, "no list of files"),
    "a list": (b"[]", NAME, "no list of files"),
    "no JSON": (b"\xff", NAME, "integrity.json"),
    "deep": (b"[" * 100_000, NAME, "integrity.json"),
    "capital digits": (manifest(PLAIN).upper().replace(b'"ALGORITHM"', b'"algorithm"'), NAME, "integrity.json"),
    "a hash that is a number": (manifest(PLAIN, files={"common.pt": 3}), NAME, "64 hexadecimal digits"),
    "a missing file": (manifest(PLAIN | {"gone": b""}), "gone", "no such file, which integrity.json lists"),
    "a name that climbs out": (manifest({"../other/x": b""}), "../other/x", "other/x"),
    "an absolute name": (manifest({"/etc/passwd": b""}), "/etc/passwd", "etc/passwd"),
    "a null byte": (manifest({"a\0b": b""}), "a\0b", ""),
    "no name": (manifest({"": b""}), "", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", WRONG)
def test_an_unsound_one_is_damage(row: str, tmp_path: Path) -> None:
    content, file, words = WRONG[row]
    for name, data in PLAIN.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / NAME).write_bytes(content)
    for folder in (folder_of(PLAIN | {NAME: content}), tmp_path):
        found = st.verify(folder)
        assert any(one.file == file and words in one.what for one in found), found


def test_a_huge_one_is_not_read(tmp_path: Path) -> None:
    for name, data in PLAIN.items():
        (tmp_path / name).write_bytes(data)
    with (tmp_path / NAME).open("wb") as file:
        file.truncate(2**40)
    (damage,) = st.verify(tmp_path)
    assert damage.file == NAME and "at most" in damage.what


def load(files: Files, verify: Any) -> Any:
    opened = st.open_checkpoint(folder_of(files), options=st.LoadOptions(verify=verify))
    return [shard.data.read() for shard in opened.values() if isinstance(shard, st.ShardedTensor)]


DEGREES: list[tuple[str, Callable[[], Files], set[Any]]] = [
    ("a data file's padding", lambda: flipped(FILES, "__0_0.distcp", 8 * PADDING), {"all"}),
    ("metadata.json, a space", lambda: FILES | {"metadata.json": PLAIN["metadata.json"] + b" "}, {"whole", "all"}),
    (".metadata", lambda: FILES | {".metadata": PLAIN[".metadata"] + b" "}, {"whole", "all"}),
    ("the manifest", lambda: FILES | {NAME: b"{}"}, {"whole", "all"}),
]


@pytest.mark.parametrize(("name", "files", "raising"), DEGREES, ids=lambda value: value if type(value) is str else "")
def test_what_each_degree_of_a_load_checks(name: str, files: Callable[[], Files], raising: set[Any]) -> None:
    for verify in ("whole", "all", None):
        if verify in raising:
            with pytest.raises(CorruptCheckpoint, match=r"integrity\.json"):
                load(files(), verify)
        else:
            assert load(files(), verify)


def test_the_common_state_is_checked_too() -> None:
    old = {path.name: path.read_bytes() for path in (FIXTURE.parent / "megatron_0161_tp2").iterdir()}
    files = old | {NAME: manifest(old)}
    st.load_common_state_dict(folder_of(files))
    place = old["common.pt"].index(b"FB") + 6
    with pytest.raises(CorruptCheckpoint, match=r"common\.pt.*SHA-256"):
        st.load_common_state_dict(folder_of(flipped(files, "common.pt", 8 * place)))


def test_one_of_another_program_beside_another_format_is_left_alone() -> None:
    folder = st.storage.MemoryStorage()
    st.save({"step": 3}, folder)
    folder.write(NAME, [memoryview(b"mine")], durable=False)
    assert st.verify(folder) == ()


@pytest.mark.parametrize(("backend", "version"), [("torch_dist", 1), ("zarr", 3)])
def test_a_save_beside_a_manifest_without_its_checkpoint_is_refused(backend: str, version: int) -> None:
    folder = folder_of({NAME: manifest({})})
    with pytest.raises(st.errors.StorageError, match="is a manifest, but its checkpoint is not in this folder"):
        st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(2))}, folder, (backend, version))
    assert folder.names() == (NAME,)


def test_overwriting_removes_the_old_manifest() -> None:
    folder = folder_of(FILES)
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(2))}, folder, ("torch_dist", 1), overwrite=True)
    assert NAME not in folder.names()
    assert st.verify(folder) == ()

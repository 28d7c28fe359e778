"""Requests that are cut off: no part of a file stays, and whatever became of a commit, a whole checkpoint is there."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import fsspec
import pytest
import torch
from fsspec.spec import AbstractBufferedFile

import shardtree as st
from shardtree.stores._fsspec import FsspecStorage
from tests.shell.checkpoint.parts import FORMATS
from tests.shell.storage.storages import ObjectStore

METADATA = "metadata.json"


class Silent(ObjectStore):
    """An object store that answers no upload of metadata.json.

    Attributes:
        applies: whether it stores what it was sent at once.
        late: what it was sent and hasn't stored, to be stored when a test says so.
        meanwhile: called before it doesn't answer.
        is_on: whether it is silent at all.
    """

    protocol = "silent"
    applies = False
    is_on = True
    deciding = METADATA

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.late: list[tuple[str, bytes]] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        if not self.is_on or not path.endswith(self.deciding):
            return super().pipe_file(path, value, **options)
        self.is_on = False
        self.meanwhile()
        if self.applies:
            super().pipe_file(path, value, **options)
        else:
            self.late.append((path, value))
        raise ConnectionResetError("the connection was cut")

    def apply(self) -> None:
        for path, value in self.late:
            super().pipe_file(path, value)


def silent_storage(**settings: Any) -> tuple[Silent, FsspecStorage]:
    files = Silent(skip_instance_cache=True)
    for name, value in settings.items():
        setattr(files, name, value)
    root = f"/{uuid4().hex}"
    return files, FsspecStorage(files, root, f"silent:/{root}")


def tree(value: float, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    return {"w": st.ShardedTensor.from_rank_offsets("w", torch.full((4,), value), (0, rank, ranks)), "step": int(value)}


def check_is(storage: FsspecStorage, value: float) -> None:
    loaded = st.load(tree(0.0), storage)
    assert (loaded["w"].tolist(), loaded["step"]) == ([value] * 4, int(value))


def save(storage: FsspecStorage, value: float) -> None:
    st.save(tree(value), storage, overwrite=True)


@pytest.mark.parametrize("over", [False, True])
def test_what_was_stored_and_not_answered_is_a_save(over: bool) -> None:
    files, storage = silent_storage(applies=True, is_on=not over)
    if over:
        save(storage, 1.0)
        files.is_on = True
    save(storage, 2.0)
    check_is(storage, 2.0)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("over", [False, True])
def test_what_may_be_stored_later_is_whole_then(over: bool, ranks: int) -> None:
    files, storage = silent_storage(is_on=not over)
    if over:
        save(storage, 1.0)
        files.is_on = True
    with pytest.raises(st.errors.OutcomeUnknown, match="no answer to the request that commits"):
        st.simulate(
            ranks,
            lambda world: st.save(tree(2.0, world.rank, ranks), storage, world=world, overwrite=True),
        )
    if over:
        check_is(storage, 1.0)
    else:
        assert not st.is_checkpoint(storage)
    files.apply()
    loaded = st.load({"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(4 * ranks))}, storage)
    assert loaded["w"].tolist() == [2.0] * 4 * ranks and loaded["step"] == 2


def test_another_saves_metadata_is_said() -> None:
    files, storage = silent_storage()
    other = tree(5.0)
    files.meanwhile = lambda: st.save(other, storage, overwrite=True)
    with pytest.raises(st.errors.CheckpointReplaced):
        save(storage, 2.0)
    check_is(storage, 5.0)


def test_a_later_save_counts_and_what_stayed_goes_once_no_request_can_arrive() -> None:
    """No condition turns a late commit away here, so that its files stay until they are old."""
    files, storage = silent_storage()
    with pytest.raises(st.errors.OutcomeUnknown):
        save(storage, 1.0)
    save(storage, 2.0)
    check_is(storage, 2.0)
    files.apply()
    check_is(storage, 1.0)
    st.save(tree(3.0), storage, overwrite=True, options=st.SaveOptions(stale_after=-1.0))
    check_is(storage, 3.0)
    assert len([name for name in storage.names() if name.startswith("save-")]) == 1


@pytest.mark.parametrize(("backend", "version"), FORMATS[1:])
def test_formats_with_a_commit_of_their_own_remove_nothing_either(backend: str, version: int) -> None:
    files, storage = silent_storage(deciding={"dcp": ".metadata"}.get(backend, METADATA))
    with pytest.raises(st.errors.OutcomeUnknown):
        st.save(tree(2.0), storage, (backend, version))
    files.apply()
    check_is(storage, 2.0)


def test_the_loss_is_seen_where_files_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: a failing save that removes what it wrote, as if it were sure that nothing arrived."""
    files, storage = silent_storage()
    monkeypatch.setattr("shardtree.shell.table._values.OutcomeUnknown", KeyboardInterrupt)
    with pytest.raises(st.errors.OutcomeUnknown):
        save(storage, 2.0)
    files.apply()
    with pytest.raises(st.CheckpointingException):
        check_is(storage, 2.0)


class Uploads(fsspec.AbstractFileSystem):
    """A store that takes a file in parts, and shows it once it is closed.

    Attributes:
        uploads: names of those that have begun, and neither ended nor been given up.
        files: what is there, by name.
    """

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.uploads: set[str] = set()
        self.files: dict[str, bytes] = {}

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return _Upload(self, path, mode, block_size=8, cache_type="none")

    def rm_file(self, path: str) -> None:
        self.files.pop(path, None)


class _Upload(AbstractBufferedFile):
    def _initiate_upload(self) -> None:
        self.sent = b""
        self.fs.uploads.add(self.path)

    def _upload_chunk(self, final: bool = False) -> bool:
        self.sent += self.buffer.getvalue()
        if final:
            self.fs.files[self.path] = self.sent
            self.fs.uploads.discard(self.path)
        return True

    def discard(self) -> None:
        self.fs.uploads.discard(self.path)


def test_a_producer_that_fails_leaves_no_part_of_a_file_and_no_upload() -> None:
    files = Uploads()
    storage = FsspecStorage(files, "bucket", "uploads://bucket")

    def producer() -> Iterator[memoryview]:
        yield memoryview(b"x" * 20)
        assert files.uploads
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        storage.write("a.bin", producer(), durable=True)
    gc.collect()
    assert (files.uploads, files.files) == (set(), {})
    assert storage.write("a.bin", [memoryview(b"x" * 20)], durable=True) == 20
    assert files.files == {"bucket/a.bin": b"x" * 20} and not files.uploads

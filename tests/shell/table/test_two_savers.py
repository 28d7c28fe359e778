"""Who may write to a folder: saves that were given up and come again, ranks that hear of it late, notes that stayed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread, current_thread
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import StorageError
from shardtree.shell.storage import owner_note
from shardtree.shell.table import _save_folders, alone_in, make_save_folder
from shardtree.storage import LocalStorage, MemoryStorage, wrapped
from shardtree.testing import Call, watched
from shardtree.world import World

OLD, NEW = 1.0, 2.0
SAVE = "save-20260102T030405-0123456789abcdef"
FORMATS: list[tuple[Any, ...]] = [(("torch_dist", 1),), (("dcp", 1),), (("zarr", 3),), (("huggingface", 1),)]


def request(storage: Any, value: float, *formats: Any, world: World | None = None) -> Any:
    rank, ranks = (0, 1) if world is None else (world.rank, world.size)
    shard = st.ShardedTensor.from_rank_offsets("w", torch.full((2, 3), value), (0, rank, ranks))
    tree = {"w": shard} | ({} if formats[:1] == (("huggingface", 1),) else {"step": value})
    return st.save(tree, storage, *formats, async_sharded_save=True, world=world)


def value_in(storage: Any) -> float:
    assert st.verify(storage) == ()
    return float(st.load_plain_tensors(storage, options=st.LoadOptions(verify="all"))["w"][-1, -1])


@pytest.mark.parametrize("formats", FORMATS, ids=lambda formats: formats[0][0])
def test_a_save_that_was_given_up_and_comes_again_leaves_the_later_one_alone(formats: tuple[Any, ...]) -> None:
    storage = MemoryStorage()
    first = request(storage, OLD, *formats)
    first.async_fn()
    first.abandon()
    second = request(storage, NEW, *formats)
    written = [second.async_fn()]
    with pytest.raises(StorageError, match="another save to 'memory:' is in progress"):
        first.execute_sync()
    second.commit(written)
    second.clean_up()
    assert value_in(storage) == NEW


def test_it_is_saved_where_no_other_save_is_in_progress() -> None:
    storage = MemoryStorage()
    first = request(storage, OLD, ("torch_dist", 1))
    first.async_fn()
    first.abandon()
    assert storage.all_names() == ()
    first.execute_sync()
    assert value_in(storage) == OLD


@pytest.mark.parametrize("formats", [FORMATS[0], FORMATS[2]], ids=lambda formats: formats[0][0])
def test_a_rank_that_hears_late_removes_nothing_of_a_later_save(formats: tuple[Any, ...]) -> None:
    storage = MemoryStorage()
    lost = st.simulate(2, lambda world: request(storage, OLD, *formats, world=world))
    for rank in (0, 1):
        lost[rank].async_fn()
    lost[0].abandon()
    later = st.simulate(2, lambda world: request(storage, NEW, *formats, world=world))
    written = [each.async_fn() for each in later]
    lost[1].abandon()
    later[0].commit(written)
    assert value_in(storage) == NEW


def test_a_request_that_never_ran_removes_nothing_when_it_is_given_up() -> None:
    storage = MemoryStorage()
    first = request(storage, OLD, ("zarr", 3))
    storage.write("w/c.0.0", [memoryview(b"mine")], durable=False)  # as another machine's save
    first.abandon()
    assert storage.all_names() == ("w/c.0.0",)


@pytest.mark.parametrize("note", [owner_note(SAVE), b"{", b""], ids=["ended", "torn", "empty"])
def test_what_a_dead_save_left_keeps_nobody_away(note: bytes) -> None:
    storage = MemoryStorage()
    storage.replace(f"{SAVE}/owner.json", note, durable=False)
    request(storage, OLD, ("dcp", 1)).execute_sync()
    assert value_in(storage) == OLD


@pytest.mark.parametrize("formats", [*FORMATS, (("torch_dist", 1), ("safetensors", 1))], ids=str)
def test_a_note_that_outlived_its_commit_harms_nothing(formats: tuple[Any, ...], tmp_path: Path) -> None:
    folder = tmp_path / "step_1"
    save = request(folder, OLD, *formats)
    save.commit([save.async_fn()])  # and killed before it could clean up
    (note,) = folder.glob("save-*/owner.json")
    assert value_in(folder) == OLD
    with pytest.raises(st.errors.AlreadyACheckpoint):
        request(folder, NEW, *formats)
    st.CheckpointSeries(tmp_path).clean()
    assert value_in(folder) == OLD
    st.save({"step": NEW}, folder, overwrite=True)
    assert not note.exists() and st.load({}, folder)["step"] == NEW and os.listdir(tmp_path) == ["step_1"]


@pytest.mark.parametrize("first_by_name", [True, False])
def test_where_there_is_no_lock_two_that_see_each_other_are_not_both_refused(
    first_by_name: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, names = MemoryStorage(), [f"save-20260102T030405-{digit * 16}" for digit in "01"]
    errors: dict[str, str] = {}
    both_noted, may_look = Event(), Event()

    def begin(save_id: str, before: Callable[[Call], None]) -> None:
        storage = watched(wrapped(inner, locked=None), before=before)
        try:
            held.append(make_save_folder(storage, save_id, durable=False, alone=True))
        except StorageError as error:
            errors[save_id] = str(error)

    def later(call: Call) -> None:
        if call.method == "names" and not call.name:
            both_noted.set()
            may_look.wait()

    def sooner(call: Call) -> None:
        if call.method == "names" and not call.name and other.ident is None:
            other.start()
            both_noted.wait()

    def take_turns(seconds: float) -> None:
        may_look.set()
        if current_thread() is not other:
            other.join()

    held: list[object] = []
    one, two = names if first_by_name else names[::-1]
    other = Thread(target=begin, args=(two, later))
    monkeypatch.setattr(_save_folders.time, "sleep", take_turns)
    begin(one, sooner)
    may_look.set()
    other.join()
    assert [*errors] == [names[1]] and len(held) == 1
    assert "in progress" in errors[names[1]] and inner.all_names() == (f"{names[0]}/owner.json",)


def test_a_note_that_cannot_be_left_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    replace = LocalStorage.replace

    def refuse(self: LocalStorage, name: str, data: bytes, *, durable: bool) -> None:
        if name.endswith("owner.json"):
            raise StorageError("the disk is full")
        replace(self, name, data, durable=durable)

    monkeypatch.setattr(LocalStorage, "replace", refuse)
    with pytest.raises(StorageError, match="the disk is full"):
        request(tmp_path / "step", OLD, ("dcp", 1))
    assert os.listdir(tmp_path) == []


def test_what_cant_be_cleaned_up_fails_no_checkpoint_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    storage = LocalStorage(str(tmp_path))
    storage.make_folder(SAVE)
    monkeypatch.setattr(_save_folders, "save_is_alive", lambda _, name: False if name == SAVE else None)

    def refuse(*_: Any) -> None:
        raise StorageError("no")

    monkeypatch.setattr(_save_folders, "remove_interrupted", refuse)
    with alone_in(storage):
        pass
    assert "no" in caplog.text

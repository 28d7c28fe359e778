"""`check_storage`: every storage of ours keeps its promises, and each of many planted faults is found."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from shardtree.shell.storage import folder_in, make_folder, storage_at
from shardtree.storage import Entry, LocalStorage, MemoryStorage, Storage, wrapped
from shardtree.testing import _check_storage, check_storage, watched
from tests.shell.storage.storages import STORAGES, made


@pytest.mark.slow
@pytest.mark.parametrize("kind", STORAGES)
def test_our_storages_keep_their_promises(kind: str, tmp_path: Path) -> None:
    check_storage(lambda: made(kind, Path(mkdtemp(dir=tmp_path))))


@pytest.mark.slow
def test_so_do_wrapped_ones_and_folders_in_them(tmp_path: Path) -> None:
    check_storage(lambda: watched(MemoryStorage()))
    places = [MemoryStorage, lambda: LocalStorage(mkdtemp(dir=tmp_path)), lambda: storage_at(f"memory://{uuid4().hex}")]
    for place in places:
        check_storage(lambda place=place: deep_in(place()))


def deep_in(storage: Storage) -> Storage:
    folder = folder_in(storage, "deep/folder")
    make_folder(folder, durable=False)
    return folder


MINIMAL = ("write", "replace", "open", "read", "length", "names", "remove", "changed", "where")


def test_a_storage_that_can_nothing_more_does() -> None:
    def bare() -> Any:
        inner = MemoryStorage()
        return SimpleNamespace(**{name: getattr(inner, name) for name in MINIMAL})

    assert isinstance(bare(), Storage)
    check_storage(bare)


# The planted faults: what is wrong, and what the law says of it.

Fault = Callable[[MemoryStorage], Any]


def lists_one_page(inner: MemoryStorage) -> Any:
    return wrapped(inner, names=lambda folder="": inner.names(folder)[:100])


def keeps_what_is_removed(inner: MemoryStorage) -> Any:
    return wrapped(inner, remove=lambda name: None)


def has_no_clock(inner: MemoryStorage) -> Any:
    return wrapped(inner, changed=lambda name: None)


def writes_through_one_buffer(inner: MemoryStorage) -> Any:
    shared = bytearray()

    def write(name: str, buffers: Any, *, durable: bool) -> int:
        shared[:] = b"".join(buffers)
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.03)  # so that another writes meanwhile, on a busy machine too
        return inner.write(name, [memoryview(bytes(shared))], durable=durable)

    return wrapped(inner, write=write)


def says_so_before_it_is_written(inner: MemoryStorage) -> Any:
    told: dict[str, int] = {}

    def write(name: str, buffers: Any, *, durable: bool) -> int:
        told[name] = getattr(buffers, "nbytes", 1)
        told[name] = inner.write(name, buffers, durable=durable)
        return told[name]

    return wrapped(inner, write=write, length=lambda name: told.get(name, inner.length(name)))


def replaces_in_two_steps(inner: MemoryStorage) -> Any:
    def replace(name: str, data: bytes, *, durable: bool) -> None:
        inner.remove(name)
        time.sleep(0.002)
        inner.write(name, [memoryview(data)], durable=durable)

    return wrapped(inner, replace=replace)


def leaves_temporary_files(inner: MemoryStorage) -> Any:
    def replace(name: str, data: bytes, *, durable: bool) -> None:
        inner.write(f"{name}.new", [memoryview(data)], durable=durable)
        inner.replace(name, data, durable=durable)

    return wrapped(inner, replace=replace)


def raises_what_it_gets(inner: MemoryStorage) -> Any:
    def read(name: str) -> bytes:
        if inner.length(name) is None:
            raise KeyError(name)
        return inner.read(name)

    return wrapped(inner, read=read)


def says_it_can_half(inner: MemoryStorage) -> Any:
    return wrapped(inner, sibling=inner.sibling)


def copies_what_it_should_move(inner: MemoryStorage) -> Any:
    return wrapped(inner, move=lambda old, new: inner.replace(new, inner.read(old), durable=True))


def makes_no_folders(inner: MemoryStorage) -> Any:
    return wrapped(inner, make_folder=lambda name, *, durable: None)


def exchanges_nothing(inner: MemoryStorage) -> Any:
    def sibling(name: str) -> Any:
        found = inner.sibling(name)
        methods = {each: getattr(found, each) for each in dir(found) if not each.startswith("_")}
        return SimpleNamespace(**{**methods, "exchange": lambda *, durable: None})

    return wrapped(inner, sibling=sibling, siblings=inner.siblings)


def passes_over_conditions(inner: MemoryStorage) -> Any:
    def replace_if(name: str, before: bytes | None, data: bytes) -> bool:
        inner.replace(name, data, durable=True)
        return True

    return wrapped(inner, replace_if=replace_if, mark=lambda name, data: replace_if(name, None, data))


def locks_nobody_out(inner: MemoryStorage) -> Any:
    return wrapped(inner, locked=lambda folder="": nullcontext())


def lists_deep_in_any_case(inner: MemoryStorage) -> Any:
    def entries(folder: str = "", *, deep: bool = True) -> dict[str, Entry]:
        start = f"{folder}/" if folder else ""
        found = (name for name in inner.all_names() if name.startswith(start))
        return {name.removeprefix(start): Entry(inner.length(name) or 0, inner.changed(name) or 0.0) for name in found}

    def content(name: str, most: int | None = None) -> bytes | None:
        return None if inner.length(name) is None else inner.read(name)

    calls = {"entries": entries, "content": content, "remove_all": lambda names: [*map(inner.remove, names)]}
    return wrapped(inner, make_folder=None, is_folder=None, remove_folder=None, **calls)


def reads_too_far(inner: MemoryStorage) -> Any:
    def read_range(name: str, begin: int, end: int) -> tuple[memoryview, int]:
        data = inner.read(name)
        return memoryview(data)[begin : end + 1], len(data)

    return wrapped(inner, read_range=read_range)


def writes_behind(inner: MemoryStorage) -> Any:
    """Data files are there, as it says, and reach the medium once something is removed."""
    later: dict[str, bytes] = {}

    def write(name: str, buffers: Any, *, durable: bool) -> int:
        if "-of-" not in name:
            return inner.write(name, buffers, durable=durable)
        later[name] = b"".join(buffers)
        return len(later[name])

    def remove(name: str) -> None:
        while later:
            late, data = later.popitem()
            inner.write(late, [memoryview(data)], durable=True)
        inner.remove(name)

    def length(name: str) -> int | None:
        return len(later[name]) if name in later else inner.length(name)

    return wrapped(inner, write=write, remove=remove, length=length)


FAULTS: dict[Fault, str] = {
    lists_one_page: r"names\('many'\) is",
    keeps_what_is_removed: "after remove of 'a.b'",
    has_no_clock: r"changed\('a'\) is None, not 'a time'",
    writes_through_one_buffer: "Threads write files at the same time: other bytes",
    says_so_before_it_is_written: "length, content and listing agree: ",
    replaces_in_two_steps: "in one step: another reader gets",
    leaves_temporary_files: r"in one step: the folder has \('m', 'm.new'\)",
    raises_what_it_gets: "KeyError",
    says_it_can_half: r"only \['sibling'\] of \['sibling', 'siblings'\]",
    copies_what_it_should_move: "after move of 'm'",
    makes_no_folders: "holds the same files",
    exchanges_nothing: "in one step: afterwards",
    locks_nobody_out: "one caller at a time: another thread came in",
    passes_over_conditions: "replaces a file only while",
    lists_deep_in_any_case: "list the existing files",
    reads_too_far: "reads up to the end of the file",
    writes_behind: "(?s)all or nothing.*count as a checkpoint, but are not whole",
}


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "found"), FAULTS.items(), ids=[fault.__name__ for fault in FAULTS])
def test_it_catches_a_storage_that(fault: Fault, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "all or nothing" not in found:  # the saves take four fifths of the time, and find only what says so
        monkeypatch.setattr(_check_storage, "check_strategy", lambda *_, **options: None)
    with pytest.raises(AssertionError, match=found):
        check_storage(lambda: fault(MemoryStorage()))


@pytest.mark.slow
def test_another_object_for_the_place_tells_what_is_there_from_what_is_remembered() -> None:
    def remembers(inner: MemoryStorage) -> Any:
        own = MemoryStorage()
        return wrapped(own, where=inner.where)  # and `inner`, the place, never sees anything

    places: dict[int, MemoryStorage] = {}

    def new_storage() -> Any:
        place = MemoryStorage()
        storage = remembers(place)
        places[id(storage)] = place
        return storage

    check_storage(new_storage)
    with pytest.raises(AssertionError, match="holds the same files"):
        check_storage(new_storage, lambda storage: places[id(storage)])

"""`check_storage`: a storage behaves like memory, and a save that dies leaves a whole checkpoint or none.

The docstring of each check is the promise that it tests; errors print it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast
from zlib import crc32

from ..errors import CorruptCheckpoint, StorageError, shorten
from ..shell.storage import (
    Capabilities,
    SizedBuffers,
    Storage,
    can,
    folder_in,
    in_threads,
    is_folder,
    locked,
    make_folder,
    move,
    remove_files,
    remove_folder,
    sync_folder,
    wrapped,
    write_parts,
)
from ..stores import MemoryStorage
from .conformance import check_strategy

Seen = Callable[[], Storage]
"""Function that opens the folder of the tested storage again, and returns the new storage."""


def check_storage(
    new_storage: Callable[[], Storage], reopen: Callable[[Storage], Storage] = lambda storage: storage
) -> None:
    """Raise unless a storage keeps all promises of `Storage` and of its own `Capabilities`.

    Args:
        new_storage: Function that returns a new empty storage at each call.
        reopen: Function that opens the folder of a storage again, as another process would, and returns the new
            storage. Without it, changes that are only in the storage's cache seem to be stored.

    Raises:
        AssertionError: The storage breaks a promise; the error names all broken promises and their faults.

    Examples:
        >>> check_storage(MemoryStorage)
    """
    problems = []
    for check in _CHECKS:
        storage = new_storage()
        try:
            check(storage, partial(reopen, storage))
        except Exception as error:
            problems.append(f"{str(check.__doc__).rstrip('.')}: {_error_line(error)}")
    try:
        check_strategy("safetensors", 1, directory=new_storage, only=_OF_SAVES)
    except Exception as error:
        problems.append(f"Saves are all or nothing: {_error_line(error)}")
    assert not problems, "a storage breaks these promises\n  " + "\n  ".join(shorten(problems, shown=12))


_OF_SAVES = (
    "a save that dies leaves no checkpoint, or a whole one",
    "a checkpoint is replaced as a whole, and only when asked",
    "the checkpoint's files are listed, and no others",
)


def _error_line(error: Exception) -> str:
    return str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"


# The comparison with memory: after each of these operations a storage must have the same content.

_FILES = (
    "a",
    "a.b",
    "b/c",
    "b/d/e",
    ".hidden",
    "with space",
    "[1]/x",
    "[1]x/y",
    "_%*?",
    "ü",
    "m",
    "new.bin",
    "no/file",
)
_FOLDERS = ("", "b", "b/d", "[1]", "many", "empty", "new", "new/d", "no", "a")


def _steps(capabilities: Capabilities) -> Iterator[partial[Any]]:
    """Yield the operations to try on a storage with these capabilities."""
    yield partial(_write_all, names=(*_FILES[:-3], *(f"many/{number:03}" for number in range(120))))
    many = [bytes([number % 251]) * (number % 7) for number in range(3000)]
    yield partial(_write, name="a", parts=many, length=sum(map(len, many)))
    yield from (partial(_write, name="a.b", parts=[b"12345"], length=length) for length in (0, 4, 10**6))
    yield partial(_write, name="a", parts=[])
    yield from (partial(_replace, name="m", data=data) for data in (b"a long one", b"", b"short"))
    yield from (partial(_remove, name=name) for name in ("a.b", "b/d/e", "a.b", "no/file"))
    yield partial(remove_files, names=["[1]/x", "many/007", "no"])
    yield partial(move, old="m", new="with space")
    whole = [(0, memoryview(b"12")), (2, memoryview(b"345678"))]
    yield partial(write_parts, name="m", length=8, parts=whole, durable=False)
    if capabilities.write_parts is not None:
        for name in ("m", "new.bin"):
            for parts in ([(4, memoryview(b"5")), (5, memoryview(b"6"))], [(0, memoryview(b"1"))]):
                yield partial(write_parts, name=name, length=6, parts=parts, durable=False)
    yield from (partial(make_folder, name="empty", durable=durable) for durable in (True, False))
    yield from (partial(remove_folder, name=name) for name in ("b", "b/d", "empty", "never"))
    yield partial(sync_folder, name="")
    yield partial(_write_inside, name="many")


def _write(storage: Storage, name: str, parts: Sequence[bytes], length: int | None = None) -> int:
    make_folder(storage, name.rpartition("/")[0], durable=False)
    buffers = (memoryview(part) for part in parts)
    return storage.write(name, buffers if length is None else SizedBuffers(length, buffers), durable=length == 0)


def _write_all(storage: Storage, names: Sequence[str]) -> list[int]:
    return [_write(storage, name, [name.encode(), b"", b"1"]) for name in names]


def _write_inside(storage: Storage, name: str) -> int:
    return _write(folder_in(storage, name), "x", [b"1"])


def _replace(storage: Storage, name: str, data: bytes) -> None:
    storage.replace(name, data, durable=bool(data))


def _remove(storage: Storage, name: str) -> None:
    storage.remove(name)


def _does_as_memory(storage: Storage, seen: Seen) -> None:
    """After each operation a storage holds the same files as a `MemoryStorage` after the same operations."""
    capabilities, model = can(storage), cast(Storage, MemoryStorage())
    if capabilities.make_folder is None:
        model = wrapped(model, make_folder=None, is_folder=None, remove_folder=None)
    for step in _steps(capabilities):
        done = f"{step.func.__name__.strip('_')} of {step.keywords.get('name', step.keywords.get('old', ''))!r}"
        result, expected = step(storage), step(model)
        assert result == expected, f"{done} returns {result!r}, not {expected!r}"
        answers, right = _look(seen()), _look(model)
        wrong = next((call for call in right if answers[call] != right[call]), None)
        assert wrong is None, f"after {done}, {wrong} is {answers[wrong]!r}, not {right[wrong]!r}"


def _look(storage: Storage) -> dict[str, object]:
    """Return the results of all calls that read a storage, by the text of the call."""
    answers: dict[str, object] = {}
    for name in _FOLDERS:
        answers[f"names({name!r})"] = storage.names(name)
        answers[f"is_folder({name!r})"] = is_folder(storage, name)
    for name in (*_FILES, "many/100", "many/x"):
        answers[f"length({name!r})"] = storage.length(name)
        answers[f"changed({name!r})"] = "a time" if storage.changed(name) is not None else None
        answers[f"read({name!r})"] = _answer(partial(storage.read, name))
        answers[f"what open({name!r}) reads"] = _answer(partial(_read_in_pieces, storage, name))
    return answers


def _answer(call: Callable[[], Any]) -> Any:
    """Return the result of a call, with bytes summarised in a text; or a text if it raises a StorageError."""
    try:
        result = call()
    except StorageError:
        return "a StorageError"
    return f"{result[:12]!r}... of {len(result)} bytes, {crc32(result)}" if isinstance(result, bytes) else result


def _read_in_pieces(storage: Storage, name: str) -> tuple[object, ...]:
    with storage.open(name) as reader:
        length, whole = reader.length, reader.read()
        room = memoryview(bytearray(length))
        reader.read_into(0, [room[: length // 3], room[length // 3 :]])
        beyond = _answer(lambda: reader.read_into(length // 2, [memoryview(bytearray(length))])) if length else None
        ends = beyond, _answer(lambda: bytes(reader.read(length // 2, length + 1)))
        part = _answer(lambda: bytes(reader.read(length // 3, length // 2)))
        whole[:1] = bytes(whole.nbytes and 1)  # writing to the buffer must not change the file
    return length, _answer(lambda: bytes(room)), part, ends


# Promises that the comparison with memory can't test.


def _goes_on(storage: Storage, seen: Seen) -> None:
    """The times that a storage's `changed` returns never go back."""
    times = []
    for name in ("f", "g", "f"):
        storage.replace(name, b"1", durable=False)
        times.append(seen().changed(name) or 0.0)
    assert times == sorted(times), f"they are {times}"


def _writes_at_once(storage: Storage, seen: Seen) -> None:
    """Threads write files at the same time."""
    expected = {f"f{number}": bytes([number]) * 50_000 for number in range(24)}
    in_threads(lambda item: _write(storage, item[0], [item[1]]), list(expected.items()), threads=8)
    wrong = [name for name, data in expected.items() if seen().read(name) != data]
    assert not wrong, f"other bytes in {wrong}"


def _breaks_off(storage: Storage, seen: Seen) -> None:
    """If a buffer raises during a write, so does the write; afterwards the file's length, content and listing agree."""

    def broken() -> Iterator[memoryview]:
        yield memoryview(bytes(70_000))
        raise KeyError("mine")

    for buffers in (broken(), SizedBuffers(100_000, broken())):
        with suppress(KeyError):
            result = storage.write("f", buffers, durable=False)
            raise AssertionError(f"it returns {result}")
        length, is_listed = seen().length("f"), "f" in seen().names()
        read = None if length is None else len(seen().read("f"))
        consistent = read == length and is_listed == (length is not None)
        assert consistent, f"length {length}, {read} bytes, listed: {is_listed}"


def _is_replaced(storage: Storage, seen: Seen) -> None:
    """A file is replaced in one step."""
    contents = [bytes([number]) * (50_000 + 1000 * number) for number in range(8)]
    storage.replace("m", contents[0], durable=False)
    stop, wrong = threading.Event(), set[str]()

    def watch(other: Storage) -> None:
        while not stop.is_set():
            try:
                data = other.read("m")
                wrong.update(() if data in contents else (f"{len(data)} bytes of a mixture",))
            except Exception as error:
                wrong.add(_error_line(error))

    readers = [threading.Thread(target=watch, args=(seen(),), daemon=True) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for turn in range(1, 41):
            storage.replace("m", contents[turn % 8], durable=turn % 8 == 0)
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    assert not wrong, f"another reader gets {sorted(wrong)}"
    assert seen().names() == ("m",), f"the folder has {seen().names()} afterwards"


def _names_the_file(storage: Storage, seen: Seen) -> None:
    """`where` and errors name the file."""
    assert "a/b.bin" in storage.where("a/b.bin"), storage.where("a/b.bin")
    try:
        seen().read("a/b.bin")
    except StorageError as error:
        assert "a/b.bin" in str(error), f"not {error}"


_TOGETHER = ("make_folder is_folder remove_folder", "sibling siblings", "replace_if mark", "entries content remove_all")


def _says_what_it_can(storage: Storage, seen: Seen) -> None:
    """A storage has all or none of the capabilities that need each other."""
    capabilities = can(storage)
    kind = type(capabilities).__name__
    assert isinstance(capabilities, Capabilities), f"they are a {kind}, not st.storage.Capabilities"
    for names in map(str.split, _TOGETHER):
        present = [name for name in names if getattr(capabilities, name) is not None]
        assert present in ([], names), f"only {present} of {names}"


def _exchanges(storage: Storage, seen: Seen) -> None:
    """The storage's own folder and one that `sibling` makes are exchanged in one step."""
    capabilities = can(storage)
    if capabilities.sibling is None or capabilities.siblings is None:
        return
    make_folder(storage, durable=False)
    storage.replace("f", b"old", durable=False)
    beside = capabilities.sibling("save-1")
    beside.make(b"note", durable=False)
    beside.storage.replace("f", b"new", durable=False)
    before = beside.note(), beside.is_exchanged(), capabilities.siblings(), seen().read("f")
    assert before == (b"note", False, ("save-1",), b"old"), f"before, {before}"
    beside.exchange(durable=False)
    after = beside.is_exchanged(), beside.old_names(), seen().read("f"), beside.storage.read("f")
    assert after == (True, ("f",), b"new", b"old"), f"afterwards, {after}"
    beside.remove()
    siblings = capabilities.siblings()
    assert (siblings, seen().read("f")) == ((), b"new"), f"after its removal, {siblings}"


_MOMENT = 0.05  # seconds: only a broken lock lets a thread in meanwhile, so a slow machine never fails a sound lock


def _locks(storage: Storage, seen: Seen) -> None:
    """A folder's lock, taken by `locked`, is held by one caller at a time."""
    if can(storage).locked is None:
        return
    make_folder(storage, durable=False)
    is_in = threading.Event()

    def come_in() -> None:
        with locked(seen()):
            is_in.set()

    other = threading.Thread(target=come_in, daemon=True)
    with locked(storage):
        other.start()
        assert not is_in.wait(_MOMENT), "another thread came in"
    other.join()
    assert is_in.is_set(), "nobody came in afterwards"


def _honours_conditions(storage: Storage, seen: Seen) -> None:
    """`replace_if` replaces a file only while it is unchanged."""
    capabilities = can(storage)
    if capabilities.replace_if is None or capabilities.mark is None:
        return
    capabilities.mark("note", b"1")
    pairs = [(b"0", b"1"), (None, b"1"), (None, b"2"), (b"1", b"3"), (b"1", b"4")]
    results = [capabilities.replace_if("f", *pair) for pair in pairs], seen().read("f"), seen().read("note")
    assert results == ([False, True, False, True, False], b"3", b"1"), f"{results} of {pairs}"


def _lists(storage: Storage, seen: Seen) -> None:
    """`entries` and `content` list the existing files."""
    capabilities = can(storage)
    if capabilities.entries is None or capabilities.content is None:
        return
    for name in ("a", "b/c", "b/d/e"):
        _write(storage, name, [name.encode()])
    entries, content = capabilities.entries, capabilities.content
    names = [sorted(listing) for listing in (entries(), entries("b"), entries(deep=False))]
    assert names == [["a", "b/c", "b/d/e"], ["c", "d/e"], ["a", "b/"]], f"{names}"
    entry = entries()["b/c"]
    assert (entry.length, entry.changed) == (3, storage.changed("b/c")), f"{entry} of 'b/c'"
    assert (content("a"), content("no")) == (b"a", None), "`content` returns other bytes"
    with suppress(CorruptCheckpoint):
        raise AssertionError(f"{content('b/c', 2)!r} where at most 2 bytes are allowed")


def _reads_ranges(storage: Storage, seen: Seen) -> None:
    """`read_range` reads up to the end of the file."""
    if (read := can(storage).read_range) is None:
        return
    _write(storage, "f", [b"abcdef"])
    for begin, end in ((0, 6), (2, 4), (4, 9), (3, 3)):
        data, length = read("f", begin, end)
        assert (bytes(data), length) == (b"abcdef"[begin:end], 6), f"{bytes(data)!r} from {begin} to {end}"


_CHECKS = (
    _does_as_memory,
    _goes_on,
    _writes_at_once,
    _breaks_off,
    _is_replaced,
    _names_the_file,
    _says_what_it_can,
    _exchanges,
    _locks,
    _honours_conditions,
    _lists,
    _reads_ranges,
)

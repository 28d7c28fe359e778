"""The journal that a conversion keeps in its destination, so that it can resume after it was killed.

It is a hidden folder with the conversion's hash in its name. For each batch it holds the names of its files, written
before they are, and then what writing the batch returned, with the files' lengths.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import count
from threading import Lock
from typing import Any

from ...codec import canonical_json, decode_tree, encode_tree, parse_json
from ...errors import CheckpointingException
from ...storage import (
    Buffer,
    Function,
    SizedBuffers,
    Storage,
    abort_open_uploads,
    around,
    in_threads,
    make_folder,
    read_ahead,
    remove_files,
    remove_folder,
    threads_of,
)
from ...strategies import Strategies, table_of
from ...trees import HOLE, Record

_PREFIX = ".convert-"
_BEGUN = "begun.json"
_SAVE = re.compile(r"save-[0-9A-Za-z-]+")
_NAMES_IN_A_LIST = 64  # since the list is written again for each name


@dataclass(frozen=True, slots=True, eq=False)
class Journal:
    """The folder in which a conversion records what is done.

    Attributes:
        storage: the destination.
        folder: the journal's own, in there.
        packages: whose classes may be in it.
    """

    storage: Storage
    folder: str
    packages: frozenset[str] = frozenset({"shardtree"})


def journal_at(
    storage: Storage, digest: str, backends: Sequence[tuple[str, int]], strategies: Strategies | None
) -> Journal:
    """Return the journal of the conversion that has this hash, into formats of these backends and versions."""
    table = table_of(strategies)
    # Only those rows: looking up another format's would import it.
    packages = {table[row].__module__.partition(".")[0] for row in table if row[1:] in backends}
    return Journal(storage, _PREFIX + digest, frozenset({"shardtree", *packages}))


def begun_save(journal: Journal) -> str | None:
    """Return the name of the save that this conversion has begun already, None if it hasn't.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> journal = Journal(MemoryStorage(), ".convert-0")
        >>> begin_journal(journal, "save-1", durable=True)
        >>> begun_save(journal)
        'save-1'
    """
    fields = _read_json(journal.storage, f"{journal.folder}/{_BEGUN}")
    save_id = fields.get("save_id") if isinstance(fields, dict) else None
    return save_id if isinstance(save_id, str) and _SAVE.fullmatch(save_id) else None


def begin_journal(journal: Journal, save_id: str, *, durable: bool) -> None:
    """Make the journal of a conversion, with the name of its save."""
    make_folder(journal.storage, journal.folder)
    journal.storage.replace(f"{journal.folder}/{_BEGUN}", canonical_json({"save_id": save_id}), durable=durable)


def has_files(journal: Journal) -> bool:
    """Return whether any file may have been written."""
    return any(name.endswith(".files") for name in journal.storage.names(journal.folder))


def announcer(journal: Journal, batch: int) -> Callable[[str], None]:
    """Return a callback that records each file's name before a batch writes it, so that the file can be removed."""
    # Not durable: a lost name leaves at most a file that no index names.
    numbers, names, lock = count(), list[str](), Lock()

    def announce(name: str) -> None:
        with lock:  # files may be written side by side
            part, place = divmod(next(numbers), _NAMES_IN_A_LIST)
            if not place:
                names.clear()
            names.append(name)
            journal.storage.replace(f"{journal.folder}/{batch:06d}-{part}.files", canonical_json(names), durable=False)

    return announce


def record(journal: Journal, batch: int, result: Any, names: Iterable[str], *, durable: bool) -> None:
    """Record that a batch is written; one whose result can't be stored will be written again.

    Args:
        journal: the conversion's.
        batch: its number.
        result: what writing returned, which the commit needs.
        names: of the files that it has written; those that are gone by now were of use to it alone.
        durable: whether the record is on the medium before this returns.
    """
    found = [*names]
    seen = in_threads(journal.storage.length, found, threads_of(journal.storage, None) or 1)
    lengths = {name: length for name, length in zip(found, seen, strict=True) if length is not None}
    try:
        data = encode_tree({"lengths": lengths, "result": result})
    except CheckpointingException:
        return
    journal.storage.replace(f"{journal.folder}/{batch:06d}.done", data, durable=durable)


def recorded(journal: Journal) -> set[int]:
    """Return the numbers of the batches that were recorded."""
    # One listing: a new conversion of many batches doesn't look for each of them.
    names = (name.partition(".") for name in journal.storage.names(journal.folder))
    return {int(number) for number, _, kind in names if kind == "done" and number.isdecimal()}


def recall(journal: Journal, batch: int) -> Any:
    """Return a batch's result, `HOLE` unless it is written and its files are as long as they were.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> journal = Journal(MemoryStorage(), ".convert-0")
        >>> record(journal, 3, ("written", 4), [], durable=True)
        >>> recall(journal, 3), recall(journal, 4)
        (('written', 4), HOLE)
    """
    name = f"{journal.folder}/{batch:06d}.done"
    if journal.storage.length(name) is None:
        return HOLE
    data = journal.storage.read(name)
    try:
        # Decoded twice: the first time to find which classes occur, of which only those that are loaded are used.
        found = decode_tree(data, types=_classes(decode_tree(data), journal.packages))
        lengths, result = found["lengths"], found["result"]
        # A file may have been removed or cut since, say by a power failure without `durable`.
        is_there = all(journal.storage.length(file) == length for file, length in lengths.items())
    except (CheckpointingException, KeyError, TypeError, AttributeError):
        return HOLE
    return result if is_there and not any(_type_names(result)) else HOLE


def _classes(tree: Any, packages: frozenset[str]) -> tuple[type, ...]:
    """Return the classes of the records in a tree, as far as they are loaded; a file must not make us import any."""
    found = []
    for name in set(_type_names(tree)):
        module, _, qualified = name.rpartition(".")
        known = getattr(sys.modules.get(module), qualified, None) if module.partition(".")[0] in packages else None
        found += [known] if isinstance(known, type) else []
    return tuple(found)


def _type_names(value: Any) -> Iterator[str]:
    if isinstance(value, Record):
        yield value.type_name
        yield from _type_names(dict(value.fields))
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from _type_names(child)
    elif isinstance(value, dict):
        for pair in value.items():
            yield from _type_names(pair)


def forget(journal: Journal) -> None:
    """Remove the journal."""
    # The name of the save goes last, so that a half-removed journal is still recognised as one.
    names = journal.storage.names(journal.folder)
    for part in ([name for name in names if name != _BEGUN], [_BEGUN]):
        remove_files(journal.storage, [f"{journal.folder}/{name}" for name in part])
    remove_folder(journal.storage, journal.folder)


def remove_others(journal: Journal) -> None:
    """Remove orphaned files of other conversions to the same place: their journals, and the files listed there."""
    keep: set[str] | None = None
    for folder in journal.storage.names():
        if folder.startswith(_PREFIX) and folder != journal.folder:
            other = Journal(journal.storage, folder)
            keep = {*_announced(journal)} if keep is None else keep
            # They may have names that this conversion writes, and otherwise take up room for good.
            _remove_files(other, keep)
            forget(other)


def abort_uploads(journal: Journal) -> None:
    """Give up the uploads that a killed call of this conversion has left open."""
    names, save_id = {*_announced(journal)}, begun_save(journal)
    abort_open_uploads(journal.storage, lambda name, _: name in names or name.partition("/")[0] == save_id)


def _announced(journal: Journal) -> list[str]:
    """Return the names of the files that were written, or begun."""
    storage = journal.storage
    lists = [_read_json(storage, f"{journal.folder}/{name}") for name in storage.names(journal.folder)]
    return [name for listed in lists if isinstance(listed, list) for name in listed if isinstance(name, str)]


def _remove_files(journal: Journal, keep: AbstractSet[str]) -> None:
    storage = journal.storage
    names = [name for name in _announced(journal) if name not in keep]
    save_id = begun_save(journal)
    folders = {save_id} if save_id else set()
    abort_uploads(journal)
    for name in names:
        storage.remove(name)
        *above, _ = name.split("/")
        folders |= {"/".join(above[:depth]) for depth in range(1, len(above) + 1)}
    for folder in sorted(folders, key=len, reverse=True):
        remove_folder(storage, folder)


def _read_json(storage: Storage, name: str) -> Any:
    if name.endswith(".done") or storage.length(name) is None:
        return None
    try:
        return parse_json(storage.read(name), name)
    except CheckpointingException:
        return None


def recording(storage: Storage, announce: Callable[[str], None]) -> tuple[Storage, set[str]]:
    """Return a storage that records the files written through it, so that they can be checked or removed.

    Args:
        storage: where the files are.
        announce: called with a file's name before it is written for the first time.

    Returns:
        The storage, and the names of the files that were written, some of which may be gone; filled as they are.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> noted, names = recording(MemoryStorage(), print)
        >>> noted.write("a.bin", [memoryview(b"abc")], durable=True), names
        a.bin
        (3, {'a.bin'})
    """
    names: set[str] = set()

    def recorded(kind: str, call: Function) -> Function | None:
        if kind in ("sibling", "siblings"):
            return None  # a conversion replaces nothing, and what other saves have left beside it isn't its own
        if kind == "write":
            return lambda name, buffers, **options: noting(call, name)(name, _ahead(buffers), **options)
        if kind == "move":
            return lambda old, new: noting(call, new)(old, new)
        if kind in ("write_parts", "replace", "replace_if"):
            return lambda name, *rest, **options: noting(call, name)(name, *rest, **options)
        return call

    def noting(call: Function, name: str) -> Function:
        """Return the call, before which the file is announced."""
        if name not in names:
            announce(name)
            names.add(name)
        return call

    noted: Storage = around(storage, recorded)
    return noted, names


_AHEAD_BYTES = 4 * 1024 * 1024


def _ahead(buffers: Iterable[Buffer]) -> Iterable[Buffer]:
    """Return buffers that are read from the source while those before are written; what is in memory as it is."""
    if isinstance(buffers, Sequence):
        return buffers
    made = read_ahead(buffers, _AHEAD_BYTES)
    return SizedBuffers(buffers.nbytes, made) if isinstance(buffers, SizedBuffers) else made

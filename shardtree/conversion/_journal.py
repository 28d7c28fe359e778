"""The journal in a conversion's destination, from which the conversion is resumed after it was killed.

The journal is a hidden folder with the conversion's hash in its name, so that no other conversion resumes it.
For each batch it holds the names of its files, recorded before they are written, and then the result of writing the
batch, with the files' lengths.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from threading import Lock
from typing import Any

from ..core.codec import addresses_of, canonical_json, decode_tree, encode_tree, parse_json
from ..core.trees import HOLE, Record
from ..errors import CheckpointingException
from ..shell.checkpoint import Backends
from ..shell.storage import (
    Buffer,
    Function,
    HostMemory,
    SizedBuffers,
    Storage,
    abort_open_uploads,
    around,
    digest,
    in_threads,
    make_folder,
    remove_files,
    remove_folder,
    threads_of,
    write_behind,
)
from ..shell.table import Checkpoint, Strategies, is_committed, save_is_alive, table_of, traits_of
from ._identity import common_hash, contents_of, source_of
from ._plan import Batch

_PREFIX = ".convert-"
_BEGUN = "begun.json"
_SAVE = re.compile(r"save-[0-9A-Za-z-]+")
_NAMES_IN_A_LIST = 64  # few, since the list is written again for each name


@dataclass(frozen=True, slots=True, eq=False)
class Journal:
    """The folder in which a conversion records its finished batches.

    Attributes:
        storage: Storage of the destination.
        folder: Name of the journal's folder in it.
        packages: Packages whose classes the recorded results may contain.
        common: Hash of the common state to write.
    """

    storage: Storage
    folder: str
    packages: frozenset[str] = frozenset({"shardtree"})
    common: str = ""


_VERSION = 1  # of the journal and of the hashed values


def journal_of(
    storage: Storage,
    source: Checkpoint,
    backends: Backends,
    batches: Sequence[Batch],
    strategies: Strategies | None,
    *,
    common: Any,
    nonce: str,
    allow_pickle: bool,
) -> Journal:
    """Return the journal of a conversion; conversions with the same journal write the same files.

    The journal's name is a hash of the source, the backends and the batches. Tensors and objects that a transform
    creates are hashed by value.

    Args:
        storage: Storage of the destination.
        source: Checkpoint to convert.
        backends: Backends of the destination.
        batches: Batches to write.
        strategies: Dispatch table; None for the process's.
        common: Common state to write. Ranks compare its hash. This hash is part of the journal's name only if the
            format writes common values to the files of tensors.
        nonce: Text that is new in each call, and the same on all its ranks; it stands for values that can't be hashed.
        allow_pickle: Whether values may be pickled.
    """
    contents = contents_of(batches, nonce=nonce, allow_pickle=allow_pickle)
    own_hash = common_hash(common)
    in_files = [own_hash] if traits_of(*backends[0], strategies).writes_common else []
    name = digest(canonical_json([_VERSION, source_of(source), backends, allow_pickle, contents, *in_files]))
    table = table_of(strategies)
    # Only rows of these backends are looked up, since looking up a row imports its format.
    packages = {table[row].__module__.partition(".")[0] for row in table if row[1:] in backends}
    return Journal(storage, _PREFIX + name, frozenset({"shardtree", *packages}), own_hash)


# The journal


def begun_save(journal: Journal) -> str | None:
    """Return the name of the save that this conversion has begun already; None if it hasn't.

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


def announcer(journal: Journal, batch: int) -> Callable[[str], None]:
    """Return a callback that records each file's name before a batch writes it, so that the file can be removed."""
    # It isn't durable: a lost name leaves at most a file that no index names.
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
    """Record that a batch is written; a batch whose result can't be stored will be written again.

    Args:
        journal: Journal of the conversion.
        batch: Number of the batch.
        result: Result of writing, which the commit needs.
        names: Names of the files that the batch has written. Files that don't exist any more were temporary, and
            aren't recorded.
        durable: Whether the record is on the medium before this returns.
    """
    files = [*names]
    sizes = in_threads(journal.storage.length, files, threads_of(journal.storage, None) or 1)
    lengths = {name: length for name, length in zip(files, sizes, strict=True) if length is not None}
    try:
        data = encode_tree({"lengths": lengths, "result": result})
    except CheckpointingException:
        return
    journal.storage.replace(f"{journal.folder}/{_done_file(batch)}", data, durable=durable)


def results_of(journal: Journal, batches: int) -> dict[int, Any]:
    """Return the results of the written batches, by number, if their files still have their recorded lengths.

    Args:
        journal: Journal of the conversion.
        batches: Number of batches.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> journal = Journal(MemoryStorage(), ".convert-0")
        >>> record(journal, 3, ("written", 4), [], durable=True)
        >>> results_of(journal, 8)
        {3: ('written', 4)}
    """
    # The folder is listed once, instead of a request for each batch.
    there = {*journal.storage.names(journal.folder)}
    results = {number: _result(journal, name) for number in range(batches) if (name := _done_file(number)) in there}
    return {number: result for number, result in results.items() if result is not HOLE}


def _done_file(batch: int) -> str:
    return f"{batch:06d}.done"


def _result(journal: Journal, name: str) -> Any:
    """Return a batch's result; `HOLE` if it can't be read, or a file was removed or truncated since."""
    data = journal.storage.read(f"{journal.folder}/{name}")
    try:
        # The result is decoded twice: the first time finds its classes, and the second time uses those already
        # imported.
        fields = decode_tree(data, types=_classes(decode_tree(data), journal.packages))
        lengths, result = fields["lengths"], fields["result"]
        # A power failure without `durable` may have such an effect.
        is_there = all(journal.storage.length(file) == length for file, length in lengths.items())
    except (CheckpointingException, KeyError, TypeError, AttributeError):
        return HOLE
    return result if is_there and not any(_type_names(result)) else HOLE


def _classes(tree: Any, packages: frozenset[str]) -> tuple[type, ...]:
    """Return the classes that a tree's records name, if they are imported; a file must not trigger an import."""
    names = {name for name in _type_names(tree) if name.partition(".")[0] in packages}
    found = {name: [kind for address in addresses_of(name) if (kind := _loaded(address))] for name in names}
    return tuple(kinds[0] for kinds in found.values() if kinds)


def _loaded(address: str) -> type | None:
    module, _, name = address.rpartition(".")
    # getattr isn't used: a package's own __getattr__ may import a module.
    kind = vars(sys.modules[module]).get(name) if module in sys.modules else None
    return kind if isinstance(kind, type) else None


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
    storage = journal.storage
    others = [name for name in storage.names() if name.startswith(_PREFIX) and name != journal.folder]
    # They may have names that this conversion writes, and otherwise take up room for good.
    keep = {*files_of(journal)} if others else set()
    for other in (Journal(storage, folder) for folder in others):
        save_id, names = begun_save(other), [name for name in files_of(other) if name not in keep]
        # A live conversion keeps its files: the first of the two to finish wins. A finished conversion isn't alive any
        # more, so the commit is looked for second.
        if save_id is not None and (save_is_alive(storage, save_id) or is_committed(storage, save_id)):
            continue
        abort_uploads(other)
        remove_files(storage, names)
        folders = {name[:at] for name in names for at, letter in enumerate(name) if letter == "/"}
        for folder in sorted(folders | ({save_id} if save_id else set()), key=len, reverse=True):
            remove_folder(storage, folder)
        forget(other)


def abort_uploads(journal: Journal) -> None:
    """Abort the uploads that a killed call of this conversion has left open."""
    names, save_id = {*files_of(journal)}, begun_save(journal)
    abort_open_uploads(journal.storage, lambda name, _: name in names or name.partition("/")[0] == save_id)


def files_of(journal: Journal) -> list[str]:
    """Return the names of the files whose writing was begun or finished."""
    storage = journal.storage
    lists = [_read_json(storage, f"{journal.folder}/{name}") for name in storage.names(journal.folder)]
    return [name for names in lists if isinstance(names, list) for name in names if isinstance(name, str)]


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
        storage: Storage of the files.
        announce: Callback with a file's name before it is written for the first time.

    Returns:
        The storage, and a set to which it adds the name of each file that it writes, temporary files included.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> storage, names = recording(MemoryStorage(), print)
        >>> storage.write("a.bin", [memoryview(b"abc")], durable=True), names
        a.bin
        (3, {'a.bin'})
    """
    names: set[str] = set()

    def wrap(kind: str, call: Function) -> Function | None:
        if kind in ("sibling", "siblings"):
            return None  # a conversion replaces nothing, and files that other saves have left beside it aren't its own
        if kind == "write":
            return lambda name, buffers, **options: _behind(partial(noting(call, name), name), buffers, options)
        if kind == "write_parts":
            return lambda name, length, parts, **options: _behind(
                partial(noting(call, name), name, length), parts, options
            )
        if kind == "move":
            return lambda old, new: noting(call, new)(old, new)
        if kind in ("replace", "replace_if"):
            return lambda name, *rest, **options: noting(call, name)(name, *rest, **options)
        return call

    def noting(call: Function, name: str) -> Function:
        """Return `call` unchanged; a file name that isn't recorded yet is announced, then recorded."""
        if name not in names:
            announce(name)
            names.add(name)
        return call

    recorder: Storage = around(storage, wrap)
    return recorder, names


_KEPT = range(256 * 1024, 16 * 1024 * 1024)
"""Sizes in bytes of the buffers that are copied into reused memory; larger ones are mostly whole tensors."""


def _behind(write: Function, pieces: Iterable[Any], options: Mapping[str, Any]) -> Any:
    """Write a file's buffers in another thread, while this thread reads the next ones; return the writer's result.

    A sequence of buffers is already in memory, and is written by this thread.

    Args:
        write: Function that writes the buffers.
        pieces: Buffers, or pairs (position in the file, buffer).
        options: Keyword arguments for `write`.
    """
    if isinstance(pieces, Sequence):
        return write(pieces, **options)
    memory = HostMemory()

    def take(handed: Iterable[Any]) -> Any:
        return write(replace(pieces, buffers=handed) if isinstance(pieces, SizedBuffers) else handed, **options)

    def kept(buffer: Buffer) -> Buffer:
        """Copy a buffer to memory from a pool, and return the copy; if the size isn't in `_KEPT`, return the buffer.

        Without the pool, many new buffers that are freed late would fragment the heap.
        """
        if buffer.nbytes not in _KEPT:
            return buffer
        copy = memoryview(memory.lend(buffer.nbytes).numpy())
        copy[:] = buffer
        return copy

    copies = ((piece[0], kept(piece[1])) if isinstance(piece, tuple) else kept(piece) for piece in pieces)
    return write_behind(take, copies, lambda piece: (piece[1] if isinstance(piece, tuple) else piece).nbytes)

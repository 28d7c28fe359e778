"""Which checkpoint is in a folder: metadata.json, written last, and whether another save took its place meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar

from ...core import limits
from ...core.codec import parse_json
from ...errors import (
    CheckpointingException,
    CheckpointReplaced,
    CorruptCheckpoint,
    NotACheckpoint,
    OutcomeUnknown,
    error_text,
)
from ..storage import Buffer, Storage, StoredFile, can, digest, in_threads, read_if_there
from ._own_hash import encode_metadata, has_misnamed_digest
from ._traits import METADATA_FILE, Stamp
from ._values import Checkpoint, Fields

T = TypeVar("T")

_KINDS = {
    "sharded_backend": str,
    "sharded_backend_version": int,
    "common_backend": str,
    "common_backend_version": int,
}


def decode_metadata(data: bytes, where: str) -> dict[str, Any]:
    """Return the fields of metadata.json.

    Args:
        data: the file's bytes.
        where: the file's name, for messages.

    Raises:
        CorruptCheckpoint: the bytes aren't what was written.
    """
    fields = parse_json(data, where)
    if not isinstance(fields, dict):
        raise CorruptCheckpoint(error_text(f"open: {where!r} is not sound", found="no JSON object"))
    fields.setdefault("sharded_backend_version", 1)
    fields.setdefault("common_backend", fields.get("sharded_backend"))
    fields.setdefault("common_backend_version", fields["sharded_backend_version"])
    for name, kind in _KINDS.items():
        if type(fields.get(name)) is not kind:
            entry = f"{name} = {fields.get(name)!r}"[:200]
            raise CorruptCheckpoint(error_text(f"open: {where!r} is not sound", found=entry, expected=kind.__name__))
    if (fields.keys() & {"digest", "save_id"} or has_misnamed_digest(fields)) and encode_metadata(fields) != data:
        fix = "The file was damaged or edited; load another checkpoint."
        raise CorruptCheckpoint(error_text(f"open: {where!r} isn't what was saved: its hash differs", fix=fix))
    return fields


def fields_of_backend(backend: str, version: int) -> Fields:
    """Return the fields of metadata.json of a folder that has none, in a format for all that is in it.

    Examples:
        >>> fields_of_backend("zarr", 3)["common_backend"]
        'zarr'
    """
    backends = {"sharded_backend": backend, "sharded_backend_version": version}
    return backends | {"common_backend": backend, "common_backend_version": version}


def is_of_others(data: bytes) -> bool:
    """Return whether a metadata.json is another program's: a JSON object without any field of ours.

    Examples:
        >>> is_of_others(b'{"license": "mit"}'), is_of_others(b'{"sharded_backend": 3}'), is_of_others(b"{")
        (True, False, False)
    """
    try:
        fields = parse_json(data, METADATA_FILE)
    except CorruptCheckpoint:
        return False
    return isinstance(fields, dict) and not fields.keys() & {*_KINDS, "save_id", "digest"}


def read_metadata(storage: Storage) -> tuple[bytes, dict[str, Any]]:
    """Return metadata.json's bytes and fields.

    Raises:
        NotACheckpoint: there is no such file.
        CorruptCheckpoint: it isn't what was written.
    """
    where = storage.where(METADATA_FILE)
    data = metadata_bytes(storage)
    if data is None:
        raise NotACheckpoint(error_text(f"open: {storage.where()!r} is not a checkpoint", found="no metadata.json"))
    return data, decode_metadata(data, where)


def metadata_bytes(storage: Storage) -> bytes | None:
    """Return metadata.json's bytes, None if there is no such file.

    Raises:
        CorruptCheckpoint: it is larger than any that a save writes, so it isn't read.
    """
    if (content := can(storage).content) is not None:
        return content(METADATA_FILE, limits.METADATA_BYTES)
    length = storage.length(METADATA_FILE)
    if length is not None and length > limits.METADATA_BYTES:
        what = f"open: {storage.where(METADATA_FILE)!r} is larger than any that a save writes"
        raise CorruptCheckpoint(error_text(what, found=f"{length} bytes", expected=f"at most {limits.METADATA_BYTES}"))
    return None if length is None else storage.read(METADATA_FILE)


def replace_metadata(storage: Storage, before: bytes | None, fields: Mapping[str, Any], *, durable: bool) -> None:
    """Write metadata.json, unless it has changed since the save began.

    Raises:
        CheckpointReplaced: another save went to the same folder meanwhile.
        OutcomeUnknown: the store didn't answer, and has what it had before: it may take the new file yet.
    """
    data = encode_metadata(fields)
    if (replace_if := can(storage).replace_if) is not None:
        if replace_if(METADATA_FILE, before, data) or _has_arrived(storage, before, data):
            return
        raise _unknown(storage, "no answer, or one that says neither yes nor no")
    check_unchanged(storage, before)
    try:
        storage.replace(METADATA_FILE, data, durable=durable)
    except OutcomeUnknown as error:
        if not _has_arrived(storage, before, data):
            raise _unknown(storage, error.__cause__ or error) from error


def _unknown(storage: Storage, found: object) -> OutcomeUnknown:
    what = f"save: no answer came to the request that commits {storage.where()!r}, which may arrive yet"
    fix = "Nothing was removed: look later whether the new checkpoint is there, or save again."
    return OutcomeUnknown(error_text(what, found=found, fix=fix))


def _has_arrived(storage: Storage, before: bytes | None, data: bytes) -> bool:
    """Return whether metadata.json holds the new bytes; raises CheckpointReplaced if it holds another save's."""
    try:
        content = metadata_bytes(storage)
    except CheckpointingException:
        return False
    if content not in (before, data):
        check_unchanged(storage, before)
    return content == data


def check_unchanged(storage: Storage, before: bytes | None) -> None:
    """Raise if metadata.json has changed since the save began.

    Raises:
        CheckpointReplaced: another save went to the same folder meanwhile, or the same one was committed already.
    """
    if metadata_bytes(storage) != before:
        fix = "Let only one save at a time go to a folder, and run a request once."
        raise CheckpointReplaced(
            error_text(f"save: {storage.where()!r} was changed by another save meanwhile", fix=fix)
        )


# Files that decide, which aren't as when a checkpoint was opened: replaced by a later save, or damaged


def stamp(storage: Storage, decided_by: Iterable[str]) -> Stamp:
    """Return the stamp of the checkpoint in a folder; () behind URLs, where none is replaced whole and looks take long.

    Formats without a metadata.json of ours have no hash that would name one save; their files have fixed names, and
    only length and time differ from another save's.

    Args:
        storage: the folder.
        decided_by: patterns of the names of the files that decide.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> storage = MemoryStorage()
        >>> storage.replace("zarr.json", b"{}", durable=False)
        >>> [name for name, *_ in stamp(storage, ["zarr.json"])]
        ['zarr.json']
    """
    if can(storage).late_requests:
        return ()
    names = [name for name in storage.names() if is_deciding(name, decided_by)]
    files = ((name, storage.length(name), storage.changed(name)) for name in names)
    return tuple((name, length, time or 0.0) for name, length, time in files if length is not None)


def is_deciding(name: str, decided_by: Iterable[str]) -> bool:
    """Return whether a file's name is one by which checkpoints are recognised.

    Examples:
        >>> is_deciding(".metadata", [".metadata"]), is_deciding("config.json", ["*.safetensors"])
        (True, False)
    """
    return any(fnmatchcase(name, pattern) for pattern in decided_by)


def check_lengths(checkpoint: Checkpoint, files: Iterable[StoredFile]) -> None:
    """Raise unless files are as long as the checkpoint says.

    Raises:
        CorruptCheckpoint: a file isn't there, or is longer or shorter.
        CheckpointReplaced: it isn't there because a later save replaced the checkpoint.
    """
    for file in files:
        if checkpoint.storage.length(file.name) != file.length:
            raise missing_file(checkpoint, file.name, file.length)


def missing_file(checkpoint: Checkpoint, name: str, length: int) -> Exception:
    """Return the error for a file that is missing or has another length than described.

    Args:
        checkpoint: what describes it.
        name: the file's name.
        length: in bytes, as described.

    Raises:
        CheckpointReplaced: a later save replaced the checkpoint.
    """
    storage = checkpoint.storage
    refuse_replaced(checkpoint)
    length_now = storage.length(name)
    return CorruptCheckpoint(
        error_text(
            f"open: {storage.where(name)!r} isn't what was saved",
            found="no such file" if length_now is None else f"{length_now} bytes",
            expected=f"{length} bytes",
            fix="The checkpoint was damaged; load another one.",
        )
    )


def unreplaced(checkpoint: Checkpoint, read: Callable[..., T], *arguments: Any) -> T:
    """Return what a strategy reads of a checkpoint.

    Raises:
        CheckpointReplaced: another save took its place meanwhile; also in place of any error of the strategy.
    """
    with unless_replaced(checkpoint):
        result = read(checkpoint, *arguments)
    check_unreplaced(checkpoint)
    return result


@contextmanager
def unless_replaced(checkpoint: Checkpoint) -> Iterator[None]:
    """Raise CheckpointReplaced in place of any error inside where another save took the checkpoint's place meanwhile.

    Files that another save has replaced look damaged, and aren't.
    """
    try:
        yield
    except CheckpointReplaced:
        raise
    except CheckpointingException:
        refuse_replaced(checkpoint)
        raise


def check_unreplaced(checkpoint: Checkpoint) -> None:
    """Raise unless everything read so far is of the checkpoint that was opened.

    Raises:
        CheckpointReplaced: another save took its place meanwhile.
        CorruptCheckpoint: a file that decides which checkpoint it is was cut meanwhile, or is being written.
    """
    # Files with fixed names would be read from a later save as if they were the opened one's. Files in a folder that
    # is named after their save need no check.
    # Rank 0 alone, which opened it: what others see of a network's folder may be older.
    asks = checkpoint.stamp and not checkpoint.traits.in_save_folder and checkpoint.world.rank == 0
    if asks and (names := refuse_replaced(checkpoint)):
        where = sorted(map(repr, map(checkpoint.storage.where, names)))
        what = "open: these files were cut while they were read, or a save is writing them"
        fix = "Load another checkpoint, or this one later."
        raise CorruptCheckpoint(error_text(what, offenders=where, fix=fix))


def refuse_replaced(checkpoint: Checkpoint) -> list[str]:
    """Return the deciding files that were cut since the checkpoint was opened.

    Raises:
        CheckpointReplaced: the folder now holds another checkpoint.
    """
    # A file that was merely cut is no save's: what is wrong with it is said by who reads it.
    names = _changed_files(checkpoint)
    if any(_is_whole(checkpoint, name) for name in names):
        what = f"open: {checkpoint.storage.where()!r} was replaced by a later save"
        raise CheckpointReplaced(error_text(what, fix="Open the checkpoint again."))
    return names


def _changed_files(checkpoint: Checkpoint) -> list[str]:
    """Return those of the files that decide which checkpoint is in the folder that aren't as when it was opened."""
    storage, digest = checkpoint.storage, checkpoint.fields.get("digest")
    # By the digest where there is one: lengths and times can agree by chance.
    # As bytes: the file may be another format's by now, and needn't parse.
    if digest is not None and (data := read_if_there(storage, METADATA_FILE)) is not None:
        return [] if f'"digest":"{digest}"'.encode() in data else [METADATA_FILE]
    now = stamp(storage, checkpoint.traits.decided_by) if checkpoint.stamp else ()
    return [entry[0] for entry in now if entry not in checkpoint.stamp]


def _is_whole(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether a file that decides ends as one of its kind does, which a part of one doesn't."""
    try:
        return checkpoint.traits.is_whole(checkpoint.storage, name)
    except CheckpointingException:
        return False


# Small files that are always checked whole: the index and the common state


def write_checked(storage: Storage, name: str, data: bytes, *, durable: bool) -> dict[str, Any]:
    """Write a file and return its entry in metadata.json."""
    storage.write(name, [memoryview(data)], durable=durable)
    return checked_entry(name, data)


def checked_entry(name: str, data: bytes) -> dict[str, Any]:
    """Return the entry of a file in metadata.json: name, length in bytes and hash."""
    return {"name": name, "length": len(data), "digest": digest(data)}


def checked_name(checkpoint: Checkpoint, field: str) -> str:
    """Return the name of the file that `read_checked` reads; that of metadata.json if this names none."""
    entry = checkpoint.fields.get(field)
    return str(entry.get("name")) if isinstance(entry, dict) else METADATA_FILE


def read_checked(checkpoint: Checkpoint, field: str) -> tuple[Buffer, str]:
    """Return the bytes of a file that metadata.json describes in one of its fields, and the file's name.

    Raises:
        CorruptCheckpoint: the file isn't there, or its bytes aren't those that were saved.
        CheckpointReplaced: it isn't there because a later save replaced the checkpoint.
    """
    if field in checkpoint.fetched:
        return checkpoint.fetched[field]
    name, length, expected = _entry(checkpoint.fields, field)
    storage = checkpoint.storage
    where = storage.where(name)
    if (content := can(storage).content) is not None:
        buffer = content(name, length)
        data = memoryview(b"" if buffer is None else buffer)
        if buffer is None or data.nbytes != length:
            raise missing_file(checkpoint, name, length)
    else:
        if storage.length(name) != length:
            raise missing_file(checkpoint, name, length)
        with storage.open(name) as reader:
            data = reader.read()
    if digest(data) != expected:
        fix = "The medium or a later program damaged it; load another checkpoint."
        raise CorruptCheckpoint(error_text(f"open: {where!r} isn't what was saved: its hash differs", fix=fix))
    return data, where


def fetch_checked(checkpoint: Checkpoint, *fields: str) -> Checkpoint:
    """Return the checkpoint with files fetched side by side, where each is a request; errors are left to the reads."""
    names = [field for field in fields if field in checkpoint.fields]
    if can(checkpoint.storage).content is not None:
        with suppress(CheckpointingException):
            contents = in_threads(partial(read_checked, checkpoint), names, threads=len(names))
            return replace(checkpoint, fetched=dict(zip(names, contents, strict=True)))
    return checkpoint


def _entry(fields: Fields, field: str) -> tuple[str, int, str]:
    entry = fields.get(field)
    if isinstance(entry, dict):
        name, length, expected = (entry.get(part) for part in ("name", "length", "digest"))
        if isinstance(name, str) and type(length) is int and isinstance(expected, str):
            return name, length, expected
    raise CorruptCheckpoint(error_text(f"open: metadata.json does not describe the {field}", found=f"{entry!r}"[:200]))

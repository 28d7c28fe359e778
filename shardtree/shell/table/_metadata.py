"""The identity of a folder's checkpoint: metadata.json, or the stamp of its deciding files.

*Deciding files* are those that make a folder a checkpoint of its format; RECOGNIZE looks for them. The *stamp* of a
checkpoint is the name, length and time of the last change of each deciding file.
"""

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
    """Return the fields of metadata.json, with defaults for missing backends.

    Args:
        data: Content of the file.
        where: Name of the file, for messages.

    Raises:
        CorruptCheckpoint: the content is damaged.
    """
    fields = parse_json(data, where)
    if not isinstance(fields, dict):
        raise CorruptCheckpoint(error_text(f"open: {where!r} is not a JSON object", found=type(fields).__name__))
    fields.setdefault("sharded_backend_version", 1)
    fields.setdefault("common_backend", fields.get("sharded_backend"))
    fields.setdefault("common_backend_version", fields["sharded_backend_version"])
    for name, kind in _KINDS.items():
        if type(fields.get(name)) is not kind:
            entry = f"{name} = {fields.get(name)!r}"[:200]
            raise CorruptCheckpoint(error_text(f"open: {where!r} is invalid", found=entry, expected=kind.__name__))
    if (fields.keys() & {"digest", "save_id"} or has_misnamed_digest(fields)) and encode_metadata(fields) != data:
        fix = "The file was damaged or edited; load another checkpoint."
        raise CorruptCheckpoint(error_text(f"open: {where!r} is damaged: its hash differs", fix=fix))
    return fields


def fields_of_backend(backend: str, version: int) -> Fields:
    """Return the fields that metadata.json would have, for a checkpoint in a format without that file.

    Examples:
        >>> fields_of_backend("zarr", 3)["common_backend"]
        'zarr'
    """
    backends = {"sharded_backend": backend, "sharded_backend_version": version}
    return backends | {"common_backend": backend, "common_backend_version": version}


def is_of_others(data: bytes) -> bool:
    """Return whether a metadata.json belongs to another program: a JSON object without any of our fields.

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
        CorruptCheckpoint: the file is damaged.
    """
    where = storage.where(METADATA_FILE)
    data = metadata_bytes(storage)
    if data is None:
        raise NotACheckpoint(error_text(f"open: {storage.where()!r} is not a checkpoint", found="no metadata.json"))
    return data, decode_metadata(data, where)


def metadata_bytes(storage: Storage) -> bytes | None:
    """Return metadata.json's bytes, or None if there is no such file.

    Raises:
        CorruptCheckpoint: the file is larger than any metadata.json of a save, so it isn't read.
    """
    if (content := can(storage).content) is not None:
        return content(METADATA_FILE, limits.METADATA_BYTES)
    length = storage.length(METADATA_FILE)
    if length is not None and length > limits.METADATA_BYTES:
        what = f"open: {storage.where(METADATA_FILE)!r} is too large for a save's metadata.json"
        raise CorruptCheckpoint(error_text(what, found=f"{length} bytes", expected=f"at most {limits.METADATA_BYTES}"))
    return None if length is None else storage.read(METADATA_FILE)


def replace_metadata(storage: Storage, before: bytes | None, fields: Mapping[str, Any], *, durable: bool) -> None:
    """Write metadata.json, unless it has changed since the save began.

    `before` is its content at that time, or None if there was no file.

    Raises:
        CheckpointReplaced: another save wrote to the folder meanwhile.
        OutcomeUnknown: the store didn't answer and still has the old file, but may take the new one later.
    """
    data = encode_metadata(fields)
    if (replace_if := can(storage).replace_if) is not None:
        if replace_if(METADATA_FILE, before, data) or _has_arrived(storage, before, data):
            return
        raise _unknown(storage, "no answer, or an ambiguous one")
    check_unchanged(storage, before)
    try:
        storage.replace(METADATA_FILE, data, durable=durable)
    except OutcomeUnknown as error:
        if not _has_arrived(storage, before, data):
            raise _unknown(storage, error.__cause__ or error) from error


def _unknown(storage: Storage, found: object) -> OutcomeUnknown:
    what = f"save: no answer to the request that commits {storage.where()!r}; the request may still be executed"
    fix = "Nothing was removed: check later whether the new checkpoint is there, or save again."
    return OutcomeUnknown(error_text(what, found=found, fix=fix))


def _has_arrived(storage: Storage, before: bytes | None, data: bytes) -> bool:
    """Return whether metadata.json is `data`; raise CheckpointReplaced if it is neither this nor the old `before`."""
    try:
        content = metadata_bytes(storage)
    except CheckpointingException:
        return False
    if content not in (before, data):
        check_unchanged(storage, before)
    return content == data


def check_unchanged(storage: Storage, before: bytes | None) -> None:
    """Raise if metadata.json has changed since the save began, when its content was `before` (None for no file).

    Raises:
        CheckpointReplaced: another save wrote to the folder meanwhile, or this save was committed already.
    """
    if metadata_bytes(storage) != before:
        fix = "Run only one save to a folder at a time, and execute each AsyncRequest only once."
        raise CheckpointReplaced(
            error_text(f"save: {storage.where()!r} was changed by another save meanwhile", fix=fix)
        )


# Changes of deciding files since a checkpoint was opened: they were replaced by a later save, or damaged.


def stamp(storage: Storage, decided_by: Iterable[str]) -> Stamp:
    """Return the stamp of a folder's checkpoint: name, length and time of the last change of each deciding file.

    Deciding files are those that make a folder a checkpoint of its format. Formats without our metadata.json have no
    hash that identifies a save. Their files have fixed names, so that only lengths and times tell one save from
    another.

    The stamp is () on object stores: requests for lengths and times are slow there, and saves don't replace a whole
    checkpoint by exchanging folders.

    Args:
        storage: Storage of the folder.
        decided_by: Patterns of the names of deciding files, as in `FormatTraits.decided_by`.

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
    """Return whether a file is a deciding file: one that makes a folder a checkpoint, as its name shows.

    Args:
        name: Name of the file.
        decided_by: Patterns of the names of deciding files, as in `FormatTraits.decided_by`.

    Examples:
        >>> is_deciding(".metadata", [".metadata"]), is_deciding("config.json", ["*.safetensors"])
        (True, False)
    """
    return any(fnmatchcase(name, pattern) for pattern in decided_by)


def check_lengths(checkpoint: Checkpoint, files: Iterable[StoredFile]) -> None:
    """Raise if a file is missing, or has another length than the checkpoint's index says.

    Raises:
        CorruptCheckpoint: a file is missing, or has another length.
        CheckpointReplaced: a file is missing because a later save replaced the checkpoint.
    """
    for file in files:
        if checkpoint.storage.length(file.name) != file.length:
            raise missing_file(checkpoint, file.name, file.length)


def missing_file(checkpoint: Checkpoint, name: str, length: int) -> Exception:
    """Return the error for a file that is missing or has the wrong length.

    Args:
        checkpoint: Checkpoint to which the file belongs.
        name: Name of the file.
        length: Length that the file should have, in bytes.

    Raises:
        CheckpointReplaced: a later save replaced the checkpoint.
    """
    storage = checkpoint.storage
    refuse_replaced(checkpoint)
    length_now = storage.length(name)
    return CorruptCheckpoint(
        error_text(
            f"open: {storage.where(name)!r} is missing or has the wrong length",
            found="no such file" if length_now is None else f"{length_now} bytes",
            expected=f"{length} bytes",
            fix="The checkpoint was damaged; load another one.",
        )
    )


def unreplaced(checkpoint: Checkpoint, read: Callable[..., T], *arguments: Any) -> T:
    """Call a strategy on a checkpoint, and return its result if no other save replaced the checkpoint meanwhile.

    Raises:
        CheckpointReplaced: another save replaced the checkpoint; takes precedence over errors of the strategy.
    """
    with unless_replaced(checkpoint):
        result = read(checkpoint, *arguments)
    check_unreplaced(checkpoint)
    return result


@contextmanager
def unless_replaced(checkpoint: Checkpoint) -> Iterator[None]:
    """Turn errors of the block into CheckpointReplaced if another save replaced the checkpoint meanwhile.

    Files that another save has replaced look damaged otherwise.
    """
    try:
        yield
    except CheckpointReplaced:
        raise
    except CheckpointingException:
        refuse_replaced(checkpoint)
        raise


def check_unreplaced(checkpoint: Checkpoint) -> None:
    """Raise if anything read so far may belong to another checkpoint than the opened one.

    Raises:
        CheckpointReplaced: another save replaced the checkpoint meanwhile.
        CorruptCheckpoint: a file that makes the folder a checkpoint was truncated meanwhile, or is being written.
    """
    # Files with fixed names could silently be those of a later save. Files in a folder that is named after their save
    # need no check. Only rank 0, which opened the checkpoint, checks: other ranks may see an older state of a network
    # folder.
    asks = checkpoint.stamp and not checkpoint.traits.in_save_folder and checkpoint.world.rank == 0
    if asks and (names := refuse_replaced(checkpoint)):
        where = sorted(map(repr, map(checkpoint.storage.where, names)))
        what = "open: files were truncated while they were read, or a save is writing them"
        fix = "Load another checkpoint, or this one later."
        raise CorruptCheckpoint(error_text(what, offenders=where, fix=fix))


def refuse_replaced(checkpoint: Checkpoint) -> list[str]:
    """Raise if a later save replaced the checkpoint; return the names of truncated files, such as metadata.json.

    Raises:
        CheckpointReplaced: the folder now holds another checkpoint.
    """
    # No save leaves a truncated file; whoever reads it reports the damage.
    names = _changed_files(checkpoint)
    if any(_is_whole(checkpoint, name) for name in names):
        what = f"open: {checkpoint.storage.where()!r} was replaced by a later save"
        raise CheckpointReplaced(error_text(what, fix="Open the checkpoint again."))
    return names


def _changed_files(checkpoint: Checkpoint) -> list[str]:
    """Return the names of files that make the folder a checkpoint and have changed since it was opened."""
    storage, digest = checkpoint.storage, checkpoint.fields.get("digest")
    # The digest is compared if there is one, since lengths and times can agree by chance. It is searched for in the
    # bytes, since the file may belong to another format by now, and needn't parse.
    if digest is not None and (data := read_if_there(storage, METADATA_FILE)) is not None:
        return [] if f'"digest":"{digest}"'.encode() in data else [METADATA_FILE]
    now = stamp(storage, checkpoint.traits.decided_by) if checkpoint.stamp else ()
    return [entry[0] for entry in now if entry not in checkpoint.stamp]


def _is_whole(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether a file that makes the folder a checkpoint is complete rather than truncated."""
    try:
        return checkpoint.traits.is_whole(checkpoint.storage, name)
    except CheckpointingException:
        return False


# Small files that are always checked whole: the index and the common state.


def write_checked(storage: Storage, name: str, data: bytes, *, durable: bool) -> dict[str, Any]:
    """Write a file and return its entry in metadata.json."""
    storage.write(name, [memoryview(data)], durable=durable)
    return checked_entry(name, data)


def checked_entry(name: str, data: bytes) -> dict[str, Any]:
    """Return the entry of a file in metadata.json: name, length in bytes and hash."""
    return {"name": name, "length": len(data), "digest": digest(data)}


def checked_name(checkpoint: Checkpoint, field: str) -> str:
    """Return the name of the file that a field of metadata.json describes; "metadata.json" if it describes none."""
    entry = checkpoint.fields.get(field)
    return str(entry.get("name")) if isinstance(entry, dict) else METADATA_FILE


def read_checked(checkpoint: Checkpoint, field: str) -> tuple[Buffer, str]:
    """Return content and full path of the file that a field of metadata.json describes, after checking its hash.

    Raises:
        CorruptCheckpoint: the file is missing or damaged.
        CheckpointReplaced: the file is missing because a later save replaced the checkpoint.
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
        raise CorruptCheckpoint(error_text(f"open: {where!r} is damaged: its hash differs", fix=fix))
    return data, where


def fetch_checked(checkpoint: Checkpoint, *fields: str) -> Checkpoint:
    """Read the files that fields of metadata.json describe, concurrently, and return the checkpoint with their content.

    The checkpoint is returned unchanged if the storage lacks the capability `content`, or if a read fails.
    """
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

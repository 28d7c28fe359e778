"""metadata.json: the file that makes a folder a checkpoint, written last."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from ..codec import canonical_json, parse_json
from ..errors import (
    CheckpointingException,
    CheckpointReplaced,
    CorruptCheckpoint,
    NotACheckpoint,
    OutcomeUnknown,
    error_text,
)
from ..storage import Buffer, Storage, can, digest, in_threads
from ._replaced import missing_file
from ._traits import METADATA_FILE
from ._values import Checkpoint, Fields

_MOST_BYTES = 2**24  # guards against a metadata.json of 1 TB with holes

_KINDS = {
    "sharded_backend": str,
    "sharded_backend_version": int,
    "common_backend": str,
    "common_backend_version": int,
}


def encode_metadata(fields: Mapping[str, Any]) -> bytes:
    """Return metadata.json's bytes: canonical JSON of the fields, with the hash of its own other bytes.

    Examples:
        >>> encode_metadata({"sharded_backend": "safetensors"})
        b'{"digest":"20af11980b75f348","sharded_backend":"safetensors"}'
    """
    plain = {name: value for name, value in fields.items() if name != "digest"}
    return canonical_json({**plain, "digest": digest(canonical_json(plain))})


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
            found = f"{name} = {fields.get(name)!r}"[:200]
            raise CorruptCheckpoint(error_text(f"open: {where!r} is not sound", found=found, expected=kind.__name__))
    if ("digest" in fields or "save_id" in fields) and encode_metadata(fields) != data:
        fix = "The file was damaged or edited; load another checkpoint."
        raise CorruptCheckpoint(error_text(f"open: {where!r} isn't what was saved: its hash differs", fix=fix))
    return fields


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
        return content(METADATA_FILE, _MOST_BYTES)
    length = storage.length(METADATA_FILE)
    if length is not None and length > _MOST_BYTES:
        what = f"open: {storage.where(METADATA_FILE)!r} is larger than any that a save writes"
        raise CorruptCheckpoint(error_text(what, found=f"{length} bytes", expected=f"at most {_MOST_BYTES}"))
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
        found = metadata_bytes(storage)
    except CheckpointingException:
        return False
    if found not in (before, data):
        check_unchanged(storage, before)
    return found == data


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


# Small files that are always checked whole: the index and the common state


def write_checked(storage: Storage, name: str, data: bytes, *, durable: bool) -> dict[str, Any]:
    """Write a file and return its entry in metadata.json: name, length in bytes and hash."""
    storage.write(name, [memoryview(data)], durable=durable)
    return {"name": name, "length": len(data), "digest": digest(data)}


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
        found = content(name, length)
        data = memoryview(b"" if found is None else found)
        if found is None or data.nbytes != length:
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
    known = [field for field in fields if field in checkpoint.fields]
    if can(checkpoint.storage).content is not None:
        with suppress(CheckpointingException):
            found = in_threads(partial(read_checked, checkpoint), known, threads=len(known))
            return replace(checkpoint, fetched=dict(zip(known, found, strict=True)))
    return checkpoint


def _entry(fields: Fields, field: str) -> tuple[str, int, str]:
    entry = fields.get(field)
    if isinstance(entry, dict):
        name, length, expected = (entry.get(part) for part in ("name", "length", "digest"))
        if isinstance(name, str) and type(length) is int and isinstance(expected, str):
            return name, length, expected
    raise CorruptCheckpoint(error_text(f"open: metadata.json does not describe the {field}", found=f"{entry!r}"[:200]))

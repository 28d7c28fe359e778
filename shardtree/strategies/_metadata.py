"""metadata.json: the file that makes a folder a checkpoint, written last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..codec import canonical_json, parse_json
from ..errors import CheckpointReplaced, CorruptCheckpoint, NotACheckpoint, error_text
from ..storage import Storage, digest
from ._clues import clue

METADATA_FILE = "metadata.json"

_MOST_BYTES = 2**24

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
    """Return whether a metadata.json is some other program's: a JSON object without any field of ours.

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
    if storage.length(METADATA_FILE) is None:
        raise not_a_checkpoint(storage)
    data = metadata_bytes(storage) or b""
    return data, decode_metadata(data, where)


def metadata_bytes(storage: Storage) -> bytes | None:
    """Return metadata.json's bytes, None where there is no such file.

    Raises:
        CorruptCheckpoint: it is larger than any that a save writes, and isn't read for that.
    """
    length = storage.length(METADATA_FILE)
    if length is not None and length > _MOST_BYTES:
        what = f"open: {storage.where(METADATA_FILE)!r} is no save's"
        raise CorruptCheckpoint(error_text(what, found=f"{length} bytes", expected=f"at most {_MOST_BYTES}"))
    return None if length is None else storage.read(METADATA_FILE)


def not_a_checkpoint(storage: Storage) -> NotACheckpoint:
    """Return the error for a place that holds no finished checkpoint."""
    fix = "Name the folder that a save was given; an unfinished save leaves no metadata.json."
    if storage.is_folder():
        state, names = "a folder without metadata.json, in no format that is recognised", storage.names()
    elif storage.length("") is not None:
        state, names = "a file in no format that is recognised", (storage.where().rpartition("/")[2],)
    else:
        state, names = "no such folder", ()
    if (known := clue(names)) is not None:
        state, fix = f"{state.partition(',')[0]}: {known[0]}", known[1]
    return NotACheckpoint(error_text(f"open: {storage.where()!r} is not a checkpoint", found=state, fix=fix))


def replace_metadata(storage: Storage, before: bytes | None, fields: Mapping[str, Any], *, durable: bool) -> None:
    """Write metadata.json, unless it isn't any more what it was when the save began.

    Raises:
        CheckpointReplaced: another save went to the same folder meanwhile.
    """
    check_unchanged(storage, before)
    storage.replace(METADATA_FILE, encode_metadata(fields), durable=durable)


def check_unchanged(storage: Storage, before: bytes | None) -> None:
    """Raise unless metadata.json is still what it was when the save began.

    Raises:
        CheckpointReplaced: another save went to the same folder meanwhile, or the same one was committed already.
    """
    if metadata_bytes(storage) != before:
        fix = "Let only one save at a time go to a folder, and run a request once."
        raise CheckpointReplaced(
            error_text(f"save: {storage.where()!r} was changed by another save meanwhile", fix=fix)
        )

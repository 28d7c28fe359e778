"""Files that aren't as an opened checkpoint describes them: replaced by a later save, or damaged."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ..codec import decode_header, header_length, parse_json
from ..codec.archives import archive_records
from ..errors import CheckpointingException, CheckpointReplaced, CorruptCheckpoint, error_text
from ..storage import Storage, StoredFile, is_folder, read_if_there
from ._traits import METADATA_FILE, stamp
from ._values import Checkpoint

T = TypeVar("T")


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
    found = storage.length(name)
    return CorruptCheckpoint(
        error_text(
            f"open: {storage.where(name)!r} isn't what was saved",
            found="no such file" if found is None else f"{found} bytes",
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
        found = read(checkpoint, *arguments)
    check_unreplaced(checkpoint)
    return found


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
    if asks and (changed := refuse_replaced(checkpoint)):
        where = sorted(map(repr, map(checkpoint.storage.where, changed)))
        what = "open: these files were cut while they were read, or a save is writing them"
        fix = "Load another checkpoint, or this one later."
        raise CorruptCheckpoint(error_text(what, offenders=where, fix=fix))


def refuse_replaced(checkpoint: Checkpoint) -> list[str]:
    """Return the deciding files that were cut since the checkpoint was opened.

    Raises:
        CheckpointReplaced: the folder now holds another checkpoint.
    """
    # A file that was merely cut is no save's: what is wrong with it is said by who reads it.
    changed = _changed(checkpoint)
    if any(_is_whole(checkpoint.storage, name) for name in changed):
        what = f"open: {checkpoint.storage.where()!r} was replaced by a later save"
        raise CheckpointReplaced(error_text(what, fix="Open the checkpoint again."))
    return changed


def _changed(checkpoint: Checkpoint) -> list[str]:
    """Return those of the files that decide which checkpoint is in the folder that aren't as when it was opened."""
    storage, digest = checkpoint.storage, checkpoint.fields.get("digest")
    # By the digest where there is one: lengths and times can agree by chance.
    # As bytes: the file may be another format's by now, and needn't parse.
    if digest is not None and (found := read_if_there(storage, METADATA_FILE)) is not None:
        return [] if f'"digest":"{digest}"'.encode() in found else [METADATA_FILE]
    now = stamp(storage, checkpoint.traits.decided_by) if checkpoint.stamp else ()
    return [entry[0] for entry in now if entry not in checkpoint.stamp]


def _is_whole(storage: Storage, name: str) -> bool:
    """Return whether a file that decides ends as one of its kind does, which a part of one doesn't."""
    try:
        with storage.open(name) as reader:
            match name.rpartition(".")[2]:
                case "latest" | "latest_universal":
                    tag = bytes(reader.read()).decode("utf-8", "replace").strip()
                    return bool(tag) and is_folder(storage, tag)
                case "pt":
                    archive_records(reader.read, reader.length, what=name)
                case "safetensors":
                    decode_header(reader.read(0, 8 + header_length(reader.read(0, 8), reader.length)), reader.length)
                case "json" | "zgroup":
                    parse_json(reader.read(), name)
                case "metadata":
                    return bytes(reader.read(max(0, reader.length - 1), reader.length)) == pickle.STOP
            return reader.length > 0
    except CheckpointingException:
        return False

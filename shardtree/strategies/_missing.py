"""Files that aren't there as a checkpoint describes them: replaced by a later save, or damaged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ..errors import CheckpointingException, CheckpointReplaced, CorruptCheckpoint, error_text
from ..storage import StoredFile
from ._metadata import METADATA_FILE
from ._stamp import stamp
from ._values import Checkpoint


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
    """Return the error for a file that isn't there as described.

    Args:
        checkpoint: what describes it.
        name: the file's name.
        length: in bytes, as described.
    """
    storage = checkpoint.storage
    if was_replaced(checkpoint):
        return _replaced(checkpoint)
    found = storage.length(name)
    return CorruptCheckpoint(
        error_text(
            f"open: {storage.where(name)!r} isn't what was saved",
            found="no such file" if found is None else f"{found} bytes",
            expected=f"{length} bytes",
            fix="The checkpoint was damaged; load another one.",
        )
    )


@contextmanager
def unreplaced(checkpoint: Checkpoint) -> Iterator[None]:
    """Raise after reading, and instead of what is raised meanwhile, if another save replaced the checkpoint.

    Raises:
        CheckpointReplaced: it did.
    """
    try:
        yield
    except CheckpointReplaced:
        raise
    except CheckpointingException as error:
        if was_replaced(checkpoint):
            raise _replaced(checkpoint) from error
        raise
    check_unreplaced(checkpoint)


def check_unreplaced(checkpoint: Checkpoint) -> None:
    """Raise unless what was read until now is of the checkpoint that was opened.

    Where files have fixed names, those of a later save would be read as if they were the opened one's.

    Raises:
        CheckpointReplaced: another save took its place meanwhile.
    """
    backends = {checkpoint.fields.get(name) for name in ("sharded_backend", "common_backend")}
    if checkpoint.stamp and backends != {"safetensors"} and was_replaced(checkpoint):
        raise _replaced(checkpoint)


def _replaced(checkpoint: Checkpoint) -> CheckpointReplaced:
    what = f"open: {checkpoint.storage.where()!r} was replaced by a later save"
    return CheckpointReplaced(error_text(what, fix="Open the checkpoint again."))


def was_replaced(checkpoint: Checkpoint) -> bool:
    """Return whether the folder now holds another checkpoint than the one that was opened."""
    storage, digest = checkpoint.storage, checkpoint.fields.get("digest")
    if digest is not None and storage.length(METADATA_FILE) is not None:
        return f'"digest":"{digest}"'.encode() not in storage.read(METADATA_FILE)
    return bool(checkpoint.stamp) and any(entry not in checkpoint.stamp for entry in stamp(storage))

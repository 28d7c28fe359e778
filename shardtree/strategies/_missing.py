"""Files that aren't there as a checkpoint describes them: replaced by a later save, or damaged."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import CheckpointReplaced, CorruptCheckpoint, error_text
from ..storage import StoredFile
from ._metadata import METADATA_FILE
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
        fix = "Open the checkpoint again."
        return CheckpointReplaced(error_text(f"open: {storage.where()!r} was replaced by a later save", fix=fix))
    found = storage.length(name)
    return CorruptCheckpoint(
        error_text(
            f"open: {storage.where(name)!r} isn't what was saved",
            found="no such file" if found is None else f"{found} bytes",
            expected=f"{length} bytes",
            fix="The checkpoint was damaged; load another one.",
        )
    )


def was_replaced(checkpoint: Checkpoint) -> bool:
    """Return whether the folder now holds another checkpoint than the one that was opened."""
    digest = checkpoint.fields.get("digest")
    if digest is None or checkpoint.storage.length(METADATA_FILE) is None:
        return False
    return f'"digest":"{digest}"'.encode() not in checkpoint.storage.read(METADATA_FILE)

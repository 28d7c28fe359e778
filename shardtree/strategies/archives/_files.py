"""A file of torch.save: its value with tensors described, and reading the few tensors that are read at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...codec.archives import Record, StoredTensor, describe_archive, filled_tensor
from ...errors import CorruptCheckpoint, error_text
from ...storage import in_threads
from ...trees import map_shards
from .._values import Checkpoint

Classes = Mapping[tuple[str, str], Any]
"""What names in pickles are: (module, qualified name) -> a constructor or a value."""


@dataclass(frozen=True, slots=True, eq=False)
class ArchiveFile:
    """A file of torch.save.

    Attributes:
        name: in the checkpoint's storage.
        length: in bytes.
        value: what was saved, with `StoredTensor` and `StoredDTensor` in place of tensors.
        records: of the zip, in the order of their bytes.
    """

    name: str
    length: int
    value: Any
    records: tuple[Record, ...]


def read_archives(checkpoint: Checkpoint, names: Sequence[str], classes: Classes) -> list[ArchiveFile]:
    """Return files, each described by its directory and its pickle; several at a time.

    Args:
        checkpoint: where they are, and how it is read.
        names: of the files.
        classes: names that pickles of the format may have, beside tensors and plain data.

    Raises:
        CorruptCheckpoint: a file isn't there, or isn't one of torch.save's.
        UnsafeFile: one names something that isn't data.
    """

    def read(name: str) -> ArchiveFile:
        where, types = checkpoint.storage.where(name), checkpoint.options.types
        if checkpoint.storage.length(name) is None:
            fix = "Copy it to the others, or load another checkpoint."
            raise CorruptCheckpoint(error_text(f"open: {where!r} belongs to the checkpoint", found="no file", fix=fix))
        with checkpoint.storage.open(name) as reader:
            what = f"open: {where!r}"
            found = describe_archive(reader.mapped, reader.length, what=what, file=name, classes=classes, types=types)
            return ArchiveFile(name, reader.length, found.value, found.records)

    return in_threads(read, names, checkpoint.options.threads)


def filled(checkpoint: Checkpoint, value: Any) -> Any:
    """Return a value with the elements of its tensors, which are read now: for the common state and objects."""

    def fill(leaf: Any) -> Any:
        if not isinstance(leaf, StoredTensor):
            return leaf
        with checkpoint.storage.open(leaf.file) as reader:
            return filled_tensor(reader.mapped, leaf, f"load: {checkpoint.storage.where(leaf.file)!r}")

    return map_shards(fill, value)

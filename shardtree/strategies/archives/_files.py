"""A file of torch.save: its value with tensors described, and reading the few tensors that are read at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ..._ambient import collector_paused
from ...codec.archives import Record, StoredTensor, describe_archive, filled_tensor
from ...errors import CorruptCheckpoint, error_text
from ...storage import Reader, fetch_ahead, in_threads, opened, threads_of
from ...trees import map_sharing
from .._values import Checkpoint
from ._values_at import ValueAt

Classes = Mapping[tuple[str, str], Any]
"""What names in pickles are: (module, qualified name) -> a constructor or a value."""


@dataclass(frozen=True, slots=True, eq=False)
class ArchiveFile:
    """A file of torch.save.

    Attributes:
        name: in the checkpoint's storage.
        where: its place, for messages.
        length: in bytes.
        value: what was saved, with `StoredTensor` and `StoredDTensor` in place of tensors.
        records: of the zip, in the order of their bytes.
    """

    name: str
    where: str
    length: int
    value: Any
    records: tuple[Record, ...]

    @property
    def saved(self) -> ValueAt:
        """The value, to be read by type."""
        return ValueAt(self.value, self.where)


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
        length = checkpoint.storage.length(name)
        if length is None:
            fix = "Copy it to the others, or load another checkpoint."
            raise CorruptCheckpoint(error_text(f"open: {where!r} belongs to the checkpoint", found="no file", fix=fix))
        with opened(checkpoint.storage, name, length) as reader:
            what = f"open: {where!r}"
            # The pickle is the first record of most, and the directory the last.
            fetch_ahead(reader, [(0, min(_END_BYTES, length)), (max(0, length - _END_BYTES), length)])
            with collector_paused():  # a large pickle makes millions of objects and no garbage
                found = describe_archive(reader.read, reader.length, what=what, file=name, classes=classes, types=types)
            return ArchiveFile(name, where, reader.length, found.value, found.records)

    return in_threads(read, names, threads_of(checkpoint.storage, checkpoint.options.threads))


_END_BYTES = 64 * 1024


def opened_at(checkpoint: Checkpoint, tensor: StoredTensor) -> AbstractContextManager[Reader]:
    """Open the file of a stored tensor, as far as its record goes."""
    return opened(checkpoint.storage, tensor.file, tensor.record.begin + tensor.record.nbytes)


def filled(checkpoint: Checkpoint, value: Any) -> Any:
    """Return a value with the elements of its tensors, which are read now: for the common state and objects."""

    def fill(leaf: Any) -> Any:
        if not isinstance(leaf, StoredTensor):
            return leaf
        with opened_at(checkpoint, leaf) as reader:
            return filled_tensor(reader.read, leaf, f"load: {checkpoint.storage.where(leaf.file)!r}")

    return map_sharing(fill, value)

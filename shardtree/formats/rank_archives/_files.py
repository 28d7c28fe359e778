"""Files of torch.save, which may be untrusted: values with checked types, and tensors of the common state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from ...errors import CorruptCheckpoint, TreePath, error_text, render_path
from ...kit import (
    Checkpoint,
    Reader,
    Storage,
    collector_paused,
    element_count,
    fetch_ahead,
    in_threads,
    map_sharing,
    opened,
    threads_of,
)
from ..archives import Record, StoredTensor, archive_records, describe_archive, filled_tensor


@dataclass(frozen=True, slots=True, eq=False)
class ValueAt:
    """A value in a file, and where it was found. Each method returns the value as one type.

    The methods raise CorruptCheckpoint if the value has another type.

    Attributes:
        value: Value of any type.
        file: Location of the file, for errors.
        path: Path of the value in the saved tree.

    Examples:
        >>> ValueAt({"groups": [{"lr": "high"}]}, "optim.pt").member("groups").items()[0].member("lr").of(int, float)
        Traceback (most recent call last):
        ...
        shardtree.errors.CorruptCheckpoint: open: 'optim.pt' has a value of an unexpected type or size
          found saved['groups'][0]['lr'] is 'high', a str, expected an int or a float
          The file was damaged, or made by another program; load another checkpoint.
    """

    value: Any
    file: str
    path: TreePath = ()

    def of(self, *kinds: type[Any]) -> Any:
        """Return `value`; raise CorruptCheckpoint unless it has one of these types. A bool isn't an int."""
        if not isinstance(self.value, kinds) or (type(self.value) is bool and bool not in kinds):
            raise self._wrong(_one_of(kinds))
        return self.value

    def count(self) -> int:
        """Return `value`; raise CorruptCheckpoint unless it is an int from 0 to 2**63 - 1."""
        number: int = self.of(int)
        if not 0 <= number < 2**63:
            raise self._wrong("0 or more, in 64 bits")
        return number

    def shape(self) -> tuple[int, ...]:
        """Return the shape that a list or a tuple holds."""
        lengths = tuple(item.count() for item in self.items())
        try:
            element_count(lengths)
        except ValueError:
            raise self._wrong("a shape whose elements 64 bits can count") from None
        return lengths

    def items(self) -> list[ValueAt]:
        """Return the items of a list or a tuple."""
        return [ValueAt(item, self.file, (*self.path, at)) for at, item in enumerate(self.of(list, tuple))]

    def member(self, name: str, default: Any = None) -> ValueAt:
        """Return a dict's value under a name; `default` in place of a missing value or None."""
        value = self.of(dict).get(name)
        return ValueAt(default if value is None else value, self.file, (*self.path, name))

    def members(self, *keys: type[Any]) -> dict[Any, ValueAt]:
        """Return the values of a dict by key; keys must have one of these types, and integers mustn't be negative."""
        entries = self.of(dict)
        for key in entries:
            if not isinstance(key, keys):
                raise self._wrong(f"keys that are each {_one_of(keys)}, not {_shown(key)}")
            if isinstance(key, int) and not 0 <= key < 2**63:
                raise self._wrong(f"keys of 0 or more, in 64 bits, not {_shown(key)}")
        return {key: ValueAt(value, self.file, (*self.path, key)) for key, value in entries.items()}

    def _wrong(self, expected: str) -> CorruptCheckpoint:
        heading = f"open: {self.file!r} has a value of an unexpected type or size"
        found = f"{render_path(self.path, 'saved')} is {_shown(self.value)}"
        fix = "The file was damaged, or made by another program; load another checkpoint."
        return CorruptCheckpoint(error_text(heading, found=found, expected=expected, fix=fix))


def _one_of(kinds: tuple[type[Any], ...]) -> str:
    return " or ".join(map(_a_type, kinds))


def _a_type(kind: type[Any]) -> str:
    if kind in (StoredTensor, type(None)):
        return "a tensor" if kind is StoredTensor else "nothing"
    return f"{'an' if kind.__name__[0] in 'aeiou' else 'a'} {kind.__name__}"


def _shown(value: Any) -> str:
    # Python refuses to show an int of very many digits.
    is_shown = isinstance(value, (str, float)) or (isinstance(value, int) and value.bit_length() < 128)
    return f"{repr(value)[:100]}, {_a_type(type(value))}" if is_shown else _a_type(type(value))


Classes = Mapping[tuple[str, str], Any]
"""Constructor or value of each name in a pickle, by module and qualified name."""


@dataclass(frozen=True, slots=True, eq=False)
class ArchiveFile:
    """A file of torch.save.

    Attributes:
        name: Name in the checkpoint's storage.
        where: Location of the file, for errors.
        length: Length in bytes.
        value: Saved value, with `StoredTensor` and `StoredDTensor` in place of tensors.
        records: Records of the zip, in the order of their bytes.
    """

    name: str
    where: str
    length: int
    value: Any
    records: tuple[Record, ...]

    @property
    def saved(self) -> ValueAt:
        """The saved value, wrapped so that each access checks its type and names the file in errors."""
        return ValueAt(self.value, self.where)


def read_archives(checkpoint: Checkpoint, names: Sequence[str], classes: Classes) -> list[ArchiveFile]:
    """Return files with their saved values and records, from their zip directories and pickles.

    Several files are read at a time.

    Args:
        checkpoint: The open checkpoint.
        names: Names of the files.
        classes: Constructors or values for further names in the format's pickles, by module and qualified name.

    Raises:
        CorruptCheckpoint: A file is missing, is not torch.save's, or is named twice.
        UnsafeFile: A file names something that is not data.
    """
    same = Counter("/".join(PurePosixPath(name).parts) for name in names)
    if twice := [repr(name) for name, count in same.items() if count > 1]:
        what = f"open: {checkpoint.storage.where()!r} names files twice"
        fix = "Each rank or tensor must have files of its own; load another checkpoint."
        raise CorruptCheckpoint(error_text(what, offenders=twice, fix=fix))

    def read(name: str) -> ArchiveFile:
        where, types = checkpoint.storage.where(name), checkpoint.options.types
        length = checkpoint.storage.length(name)
        if length is None:
            fix = "Copy it beside the other files, or load another checkpoint."
            raise CorruptCheckpoint(error_text(f"open: {where!r} is missing", fix=fix))
        with opened(checkpoint.storage, name, length) as reader:
            what = f"open: {where!r}"
            # The pickle is usually the first record, and the directory is at the end.
            fetch_ahead(reader, [(0, min(_END_BYTES, length)), (max(0, length - _END_BYTES), length)])
            with collector_paused():  # A large pickle makes millions of objects and no garbage.
                archive = describe_archive(
                    reader.read, reader.length, what=what, file=name, classes=classes, types=types
                )
            return ArchiveFile(name, where, reader.length, archive.value, archive.records)

    return in_threads(read, names, threads_of(checkpoint.storage, checkpoint.options.threads))


_END_BYTES = 64 * 1024


def opened_at(checkpoint: Checkpoint, tensor: StoredTensor) -> AbstractContextManager[Reader]:
    """Open the file of a stored tensor, up to the end of the tensor's record."""
    return opened(checkpoint.storage, tensor.file, tensor.record.begin + tensor.record.nbytes)


def filled(checkpoint: Checkpoint, value: Any) -> Any:
    """Read the tensors in a value, such as the common state or an object, and return the value with them."""

    def fill(leaf: Any) -> Any:
        if not isinstance(leaf, StoredTensor):
            return leaf
        with opened_at(checkpoint, leaf) as reader:
            return filled_tensor(reader.read, leaf, f"load: {checkpoint.storage.where(leaf.file)!r}")

    return map_sharing(fill, value)


def hyperparameters(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return an optimizer's param groups without the entry "params", the parameters' indices in this optimizer."""
    return [{name: value for name, value in group.items() if name != "params"} for group in groups]


def is_whole_archive(storage: Storage, name: str) -> bool:
    """Return whether a file isn't empty; an archive of torch.save must also have its directory, which is written last.

    Raises:
        CorruptCheckpoint: The archive has no directory.
    """
    with storage.open(name) as reader:
        if name.endswith(".pt"):  # metadata.pkl is a plain pickle.
            archive_records(reader.read, reader.length, what=name)
        return reader.length > 0

"""Archives of trees with many tensors: the tree, with where each tensor's elements are in place of the tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import CorruptCheckpoint, error_text
from ..pickles import Constructor, read_pickle
from ._classes import NAMED, constructors
from ._decode import VALUES
from ._dtensors import DTENSOR_CLASSES, DTensorParts, Wrapped
from ._payload import DESCRIBERS, DescribedTensor
from ._records import Archive, open_archive
from ._tensors import DTYPES, NUMPY, STORAGE_KINDS, StorageKind, StorageReference, storage_reference
from ._zip import Read, Record

_MOST_AXES = 64
_FIX = (
    "Nothing but data is read from such a file; an enum, a dataclass or a named tuple needs LoadOptions(types=(...))."
)


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor of an archive that isn't read.

    Attributes:
        file: the archive's name, as the caller gave it.
        dtype: of the elements.
        shape: lengths.
        stride: elements from one to the next, by axis.
        begin: the byte of the file where its first element is.
        record: the record that it lies in.
    """

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin: int
    record: Record

    @property
    def is_row_major(self) -> bool:
        """Whether its elements are adjacent, in row-major order."""
        expected = 1
        for length, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if length not in (0, 1) and step != expected:
                return False
            expected *= max(length, 1)
        return True


@dataclass(frozen=True, slots=True, eq=False)
class StoredDTensor:
    """A rank's part of a DTensor, which isn't read.

    Attributes:
        local: its own elements.
        shape: the global tensor's.
        parts: where they belong in it.
    """

    local: StoredTensor
    shape: tuple[int, ...]
    parts: DTensorParts


@dataclass(frozen=True, slots=True, eq=False)
class Description:
    """An archive's value without its tensors' elements.

    Attributes:
        value: what was saved; tensors are `StoredTensor` and `StoredDTensor`.
        records: the archive's, in the order of their bytes.
    """

    value: Any
    records: tuple[Record, ...]


def describe_archive(
    read: Read,
    length: int,
    *,
    what: str,
    file: str,
    classes: Mapping[tuple[str, str], Any] | None = None,
    types: Iterable[type] = (),
) -> Description:
    r"""Return the value that torch.save saved, with descriptions in place of tensors; the bytes may be untrusted.

    Only the directory and the pickle are read. DTensors are described without torch.distributed.

    Args:
        read: returns the bytes from one byte of the archive up to another.
        length: of the archive, in bytes.
        what: the archive, for messages.
        file: the archive's name, for `StoredTensor.file`.
        classes: further names that the pickle may have, and what they are.
        types: enums, dataclasses and named tuples that may be in it.

    Raises:
        CorruptCheckpoint: it isn't such an archive, or contradicts itself.
        UnsafeFile: it names something that isn't data.
        UnsupportedValue: a tensor is quantised, sparse, or of a kind that isn't read.

    Examples:
        >>> import io
        >>> out = io.BytesIO()
        >>> torch.save({"w": torch.arange(6.0)[2:], "step": 7}, out)
        >>> data = out.getvalue()
        >>> found = describe_archive(lambda begin, end: data[begin:end], len(data), what="example", file="w.pt").value
        >>> found["step"], found["w"].shape, data[found["w"].begin :][:4]
        (7, (4,), b'\x00\x00\x00@')
    """
    archive = open_archive(read, length, what)
    places = _Places(archive, file)
    known = {
        **VALUES,
        **NAMED,
        **NUMPY,
        **STORAGE_KINDS,
        **DTYPES,
        **{name: places.constructor(described) for name, described in DESCRIBERS.items()},
        **DTENSOR_CLASSES,
        ("torch", "Tensor"): _TENSOR,
        ("torch._tensor", "_rebuild_from_type_v2"): Constructor(places.typed),
        **(classes or {}),
        **constructors(types),
    }
    pickled = archive.checked("data.pkl")
    refused = frozenset({StorageKind, StorageReference, DescribedTensor, Wrapped})
    value = read_pickle(pickled, known, what=what, persistent_load=storage_reference, fix=_FIX, refused=refused)
    return Description(value, tuple(archive.records.values()))


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """Finds the places of an archive's tensors.

    Attributes:
        archive: the archive.
        file: its name.
    """

    archive: Archive
    file: str

    def constructor(self, described: Constructor) -> Constructor:
        """Return the constructor of tensors that a function of torch's rebuilds."""
        return Constructor(lambda *args: _parameter(args) or self._place(described.make(*args)))

    def _place(self, tensor: Any) -> StoredTensor:
        if type(tensor) is not DescribedTensor:
            raise TypeError("a tensor without a storage")
        record = self.archive.records.get(f"data/{tensor.storage.key}")
        if record is None or record.nbytes < tensor.storage.nbytes:
            raise ValueError(f"the bytes of storage {tensor.storage.key[:100]!r} aren't there")
        layout = tensor.place
        begin = record.begin + layout.offset * layout.dtype.itemsize
        return StoredTensor(self.file, layout.dtype, layout.shape, layout.stride, begin, record)

    def typed(self, function: Any, kind: Any, args: Any, state: Any) -> Any:
        """Return a tensor with attributes, or of a subclass."""
        made = function.make(*args) if type(function) is Constructor and type(args) is tuple else None
        if type(made) is StoredTensor and kind is _TENSOR:
            return made  # attributes of the object, such as DeepSpeed's ids, aren't needed
        if type(made) is not Wrapped:
            raise TypeError("a tensor's subclass that isn't known")
        local, parts = made.placed(state, self._ints)
        if type(local) is not StoredTensor or local.dtype != made.dtype or len(made.shape) > _MOST_AXES:
            raise ValueError("a DTensor whose local tensor isn't a tensor of its dtype")
        return StoredDTensor(local, made.shape, parts)

    def _ints(self, stored: Any) -> tuple[int, ...]:
        if type(stored) is not StoredTensor or stored.dtype not in (torch.int32, torch.int64):
            raise TypeError("a mesh whose ranks aren't a tensor of integers")
        values: list[int] = filled_tensor(self.archive.read, stored, self.archive.what).flatten().tolist()
        return tuple(values)


def _parameter(args: tuple[Any, ...]) -> Any:
    """Return the tensor of a parameter's arguments: it was placed before; None for a tensor's own."""
    return args[0] if args and type(args[0]) in (StoredTensor, StoredDTensor) else None


def _not_callable(*args: Any) -> Any:
    raise TypeError("a call of torch.Tensor")


_TENSOR = Constructor(_not_callable)


def filled_tensor(read: Read, stored: StoredTensor, what: str) -> torch.Tensor:
    """Return a stored tensor with its elements, in new memory.

    Args:
        read: returns the bytes from one byte of the archive up to another.
        stored: as `describe_archive` returned it.
        what: the archive, for messages.

    Raises:
        CorruptCheckpoint: its bytes aren't there.
    """
    reach = sum((length - 1) * step for length, step in zip(stored.shape, stored.stride, strict=True))
    count = 0 if 0 in stored.shape else reach + 1
    data = bytearray(read(stored.begin, stored.begin + count * stored.dtype.itemsize))
    if len(data) != count * stored.dtype.itemsize:
        raise CorruptCheckpoint(error_text(f"{what}: a tensor's bytes aren't there"))
    if not count:
        return torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
    return torch.frombuffer(data, dtype=stored.dtype).as_strided(stored.shape, stored.stride).clone()

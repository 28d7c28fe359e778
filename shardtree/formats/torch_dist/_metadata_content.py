"""Content of `.metadata` in columns, and the allowlist of names that its pickle may contain.

None of them is imported: names of dtypes stand for the dtypes, torch.Size makes tuples, and classes become stubs.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ...errors import CorruptCheckpoint, error_text
from ...kit import Column
from ..pickles import Constructor, Stub, inert
from ._pickled_columns import Ints

Paths = dict[str, tuple[str | int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class ArchivePlaces:
    """Places of archives: the file and the byte range of each.

    Attributes:
        file: Name of the file of each place.
        byte: Offset of each archive in its file, int64 (places,).
        length: Length of each archive in bytes, int64 (places,).
        refusals: Reason that an archive can't be read, by the number of its place.
    """

    file: Sequence[str]
    byte: Column
    length: Column
    refusals: Mapping[int, str]


@dataclass(frozen=True, slots=True, eq=False)
class TensorEntry:
    """The entry of a tensor in `.metadata`, whose numbers aren't checked yet.

    Attributes:
        dtype: Dtype of the tensor; None if this torch lacks it.
        shape: Global shape.
        offsets: Offset of each chunk, int64 (chunks, axes).
        shapes: Shape of each chunk, int64 (chunks, axes).
        places: Position of each chunk's archive in the file's `ArchivePlaces`, int64 (chunks,).
        grid_shape: Original shape of a tensor that older Megatron-Core stored as a grid of flattened cells; else None.
    """

    dtype: torch.dtype | None
    shape: Ints
    offsets: Column
    shapes: Column
    places: Column
    grid_shape: Ints | None = None

    @property
    def boxes(self) -> list[tuple[Ints, Ints]]:
        """Offset and shape of each chunk."""
        pairs = zip(self.offsets.tolist(), self.shapes.tolist(), strict=True)
        return [(tuple(offset), tuple(shape)) for offset, shape in pairs]


@dataclass(frozen=True, slots=True, eq=False)
class TensorEntries(Mapping[str, TensorEntry]):
    """The entries of all tensors, by key. They are stored as columns; an entry is made when it is accessed.

    Sending columns to other ranks takes a small part of the time that sending entries would take.

    Attributes:
        number: Position of each tensor in `kinds` and `wholes`, by key.
        kinds: Dtype of each tensor; None if this torch lacks it.
        wholes: Global shape of each tensor.
        edges: Row of each tensor's first chunk in `offsets`, `shapes` and `places`; finally the count of all chunks.
        offsets: Offset of each chunk, left-aligned, int64 (chunks, axes).
        shapes: Shape of each chunk, left-aligned, int64 (chunks, axes).
        places: Position of each chunk's archive in the file's `ArchivePlaces`, int64 (chunks,).
        grid_shapes: Original shapes of tensors that older Megatron-Core stored as grids of flattened cells, by key.
    """

    number: dict[str, int]
    kinds: Sequence[torch.dtype | None]
    wholes: Sequence[Ints]
    edges: Sequence[int]
    offsets: Column
    shapes: Column
    places: Column
    grid_shapes: Mapping[str, Ints]

    def __getitem__(self, key: str) -> TensorEntry:
        """Return the entry of a tensor."""
        at = self.number[key]
        whole, rows = self.wholes[at], slice(self.edges[at], self.edges[at + 1])
        width = len(whole)
        boxes = self.offsets[rows, :width], self.shapes[rows, :width]
        return TensorEntry(self.kinds[at], whole, *boxes, self.places[rows], self.grid_shapes.get(key))

    def __contains__(self, key: object) -> bool:
        """Return whether there is a tensor with this key, without making its entry."""
        return key in self.number

    def __iter__(self) -> Iterator[str]:
        """Return the keys, in the file's order."""
        return iter(self.number)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.number)


@dataclass(frozen=True, slots=True, eq=False)
class MetadataFile:
    """The content of `.metadata`.

    Attributes:
        tensors: Entries of the tensors, by key.
        values: Position of each pickled value's archive in `places`, by the value's name.
        paths: Path of each name in the nested state; None if paths are not stored.
        places: File and byte range of each archive.
    """

    tensors: Mapping[str, TensorEntry]
    values: dict[str, int]
    paths: Paths | None
    places: ArchivePlaces


# This is the allowlist of names in `.metadata`, for all versions that wrote it; none is imported, each becomes a stub.

_CHECKPOINT = "torch.distributed.checkpoint"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_MEGATRON = "megatron.core.dist_checkpointing"

_STUBS = {
    f"{_CHECKPOINT}.metadata": (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    f"{_CHECKPOINT}.filesystem": ("_StorageInfo", "_StoragePrefix"),
    f"{_CHECKPOINT}.planner": (
        "SavePlan",
        "WriteItem",
        "WriteItemType",
        "TensorWriteData",
        "BytesIOWriteData",
    ),
    f"{_CHECKPOINT}._extension": ("StreamTransformExtension", "ZStandard"),
    _OLD: ("TensorProperties", "MEM_FORMAT_ENCODING"),
    f"{_MEGATRON}.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
    f"{_MEGATRON}.strategies.filesystem_async": ("_StoragePrefix",),
    "torch.serialization": ("_get_layout",),
}

_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path", "PurePath")


class _Names(dict[tuple[str, str], Any]):
    """Values of the names that `.metadata` may contain, by module and name.

    An unknown name of the module torch is taken as a dtype that this torch lacks, and becomes a stub: only loads of its
    tensors fail.
    """

    def __missing__(self, key: tuple[str, str]) -> Any:
        module, name = key
        # Only names of torch itself become stubs: any other name in the file is refused as unsafe.
        if module == "torch" and name.isidentifier():
            return Stub(f"torch.{name}")
        raise KeyError(key)


def _size(*arguments: Any) -> tuple[Any, ...]:
    """Return a shape as a plain tuple; its entries aren't checked here."""
    (entries,) = arguments or ((),)
    if type(entries) not in (tuple, list):
        raise ValueError(f"torch.Size of {type(entries).__name__}")
    return tuple(entries)


@cache
def metadata_classes() -> Mapping[tuple[str, str], Any]:
    """Return the replacement of each class, function or dtype that `.metadata` may name, by module and name.

    A dtype stands for itself. A class or function is replaced by a constructor of stubs or of plain tuples.

    Examples:
        >>> metadata_classes()["torch", "float32"]
        torch.float32
    """
    # Python 3.13 pickles paths by the name of the module pathlib._local.
    names = {(module, name): inert(f"{module}.{name}") for module, classes in _STUBS.items() for name in classes}
    names |= {(module, name): inert("path") for module in ("pathlib", "pathlib._local") for name in _PATHS}
    dtypes = {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    return _Names({**names, **dtypes, ("torch", "Size"): Constructor(_size)})


def is_a(value: Any, name: str) -> bool:
    """Return whether a value of `.metadata` has a class of that name, in any module.

    Examples:
        >>> is_a(Stub("torch.distributed.checkpoint.metadata.Metadata"), "Metadata")
        True
    """
    return isinstance(value, Stub) and value.type_name.rpartition(".")[2] == name


def field_of(value: Any, name: str) -> Any:
    """Return a field of an object of `.metadata`; None if it has no such field.

    Examples:
        >>> field_of(Stub("some.Class", state={"size": (2, 3)}), "size")
        (2, 3)
    """
    state = value.state if isinstance(value, Stub) else None
    return state.get(name) if isinstance(state, dict) else None


# With `allow_pickle` the writer is trusted: unknown classes are imported, and known ones stay stubs.


def read_trusted(data: bytes, classes: Mapping[tuple[str, str], Any], *, what: str) -> Any:
    """Return the value of a pickle from a trusted writer; reading it may run any code.

    Args:
        data: Bytes of the pickle.
        classes: Values of known names, by module and name; other names are imported.
        what: Description of the file, for errors.

    Raises:
        CorruptCheckpoint: The bytes aren't a pickle, or code that it runs fails.
    """
    try:
        return _Unpickler(io.BytesIO(data), classes).load()
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"[:300]
        raise CorruptCheckpoint(error_text(f"{what}: not a pickle that can be read", found=cause)) from error


class _Unpickler(pickle.Unpickler):
    """An unpickler that makes stubs of known classes, so that it returns the same values as the safe reader."""

    def __init__(self, file: io.BytesIO, classes: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(file)
        self.classes = classes

    def find_class(self, module: str, name: str) -> Any:
        """Return the stub or value of a known name, or import the name."""
        try:
            value = self.classes[module, name]
        except KeyError:
            return super().find_class(module, name)
        if not isinstance(value, Constructor):
            return value
        return value.make if value.build is None else type(name, (_StubClass,), {"constructor": value})


class _StubClass(Stub):
    """A stub class that `pickle` can make instances of."""

    __slots__ = ()
    constructor: Constructor

    def __new__(cls, *arguments: Any) -> _StubClass:
        self = super().__new__(cls)
        stub = cls.constructor.make(*arguments)
        self.type_name, self.args, self.state = stub.type_name, stub.args, stub.state
        return self

    def __init__(self, *arguments: Any) -> None:
        """Do nothing, since `__new__` has filled the stub."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


def kind_of(value: Any) -> str:
    """Return the name of the type of a value of `.metadata`, for errors.

    Examples:
        >>> kind_of(Stub("some.Class")), kind_of([])
        ('some.Class', 'list')
    """
    return value.type_name if isinstance(value, Stub) else type(value).__name__

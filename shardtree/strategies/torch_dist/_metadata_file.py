"""`.metadata`: a pickle of torch.distributed.checkpoint, parsed without running any code that it names."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import torch

from ...codec.pickles import Constructor, Stub, inert, read_pickle
from ...errors import CorruptCheckpoint, error_text
from .._manifest import check_listed
from .._traits import METADATA_FILE
from .._values import Checkpoint

INDEX_FILE = ".metadata"
"""The file that lists which archive lies where."""


# An allowlist of the names in `.metadata`, of all versions that wrote it: none is imported, each becomes a stub

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
    """Values by name. A dtype that this torch lacks is a stub: it only matters if its tensor is asked for."""

    def __missing__(self, key: tuple[str, str]) -> Any:
        module, name = key
        # Only names of torch itself: anything else in the file is refused as unsafe.
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
    """Return the value of each name that `.metadata` may contain: a dtype, a plain tuple, or a stub.

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
    """Return whether a value of `.metadata` is of a class of that name, in whichever module a version of torch had it.

    Examples:
        >>> is_a(Stub("torch.distributed.checkpoint.metadata.Metadata"), "Metadata")
        True
    """
    return isinstance(value, Stub) and value.type_name.rpartition(".")[2] == name


def field_of(value: Any, name: str) -> Any:
    """Return a field of an object of `.metadata`, None if it has none.

    Examples:
        >>> field_of(Stub("some.Class", state={"size": (2, 3)}), "size")
        (2, 3)
    """
    state = value.state if isinstance(value, Stub) else None
    return state.get(name) if isinstance(state, dict) else None


# Unpickling with `allow_pickle`, when the writer is trusted: unknown classes are imported, known ones stay stubs


def read_trusted(data: bytes, classes: Mapping[tuple[str, str], Any], *, what: str) -> Any:
    """Return the value of a pickle, which may run any code.

    Args:
        data: the pickle.
        classes: values of names that aren't imported.
        what: the file, for messages.

    Raises:
        CorruptCheckpoint: it isn't a pickle, or code that it runs fails.
    """
    try:
        return _Unpickler(io.BytesIO(data), classes).load()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"[:300]
        raise CorruptCheckpoint(error_text(f"{what}: not a pickle that can be read", found=found)) from error


class _Unpickler(pickle.Unpickler):
    """Makes stubs of known classes, so that the caller gets the same values as from the safe reader."""

    def __init__(self, file: io.BytesIO, classes: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(file)
        self.classes = classes

    def find_class(self, module: str, name: str) -> Any:
        """Return the value of a name."""
        try:
            known = self.classes[module, name]
        except KeyError:
            return super().find_class(module, name)
        if not isinstance(known, Constructor):
            return known
        return known.make if known.build is None else type(name, (_Known,), {"made": known})


class _Known(Stub):
    """A stub as a class, of which `pickle` can make instances."""

    __slots__ = ()
    made: Constructor

    def __new__(cls, *arguments: Any) -> _Known:
        self = super().__new__(cls)
        stub = cls.made.make(*arguments)
        self.type_name, self.args, self.state = stub.type_name, stub.args, stub.state
        return self

    def __init__(self, *arguments: Any) -> None:
        """Leave it as it was made."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


Ints = tuple[int, ...]

_MOST_AXES = 64  # NumPy's limit
_DEEPEST = 100


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where an archive lies.

    Attributes:
        file: the file's name.
        byte: where the archive begins in it.
        length: in bytes.
        refusal: why it can't be read, as text; empty if it can.
    """

    file: str
    byte: int
    length: int
    refusal: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class TensorEntry:
    """The entry of one tensor in `.metadata`; numbers are ints, and not checked further.

    Attributes:
        dtype: None if this torch lacks it.
        shape: global shape.
        offsets: of its chunks.
        shapes: of its chunks.
        places: of its chunks.
        grid_shape: the shape of the whole tensor, if `shape` is a grid of flattened cells; else None.
    """

    dtype: torch.dtype | None
    shape: Ints
    offsets: list[Ints]
    shapes: list[Ints]
    places: list[Place]
    grid_shape: Ints | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MetadataFile:
    """The content of `.metadata`.

    Attributes:
        tensors: by key.
        values: where the archive of each pickled value is, by name.
        paths: where in the nested state each name was; None if that isn't stored.
    """

    tensors: dict[str, TensorEntry]
    values: dict[str, Place]
    paths: dict[str, tuple[str | int, ...]] | None


def read_metadata_file(checkpoint: Checkpoint) -> MetadataFile:
    """Return the content of a checkpoint's `.metadata`.

    Raises:
        CorruptCheckpoint: it isn't there, or isn't what torch.distributed.checkpoint writes.
        UnsafeFile: it names something that it never needs, and `allow_pickle` isn't given.
    """
    where = checkpoint.storage.where(INDEX_FILE)
    if checkpoint.storage.length(INDEX_FILE) is None:
        fix = "Name the folder that a save was given; an interrupted save leaves none."
        raise CorruptCheckpoint(error_text(f"open: {where!r} isn't there", fix=fix))
    # Only Megatron-Core's integrity.json has a hash of the index: without it, contradictions are all that can be found.
    if checkpoint.options.verify is not None:
        check_listed(checkpoint, METADATA_FILE)
        check_listed(checkpoint, INDEX_FILE)
    data = checkpoint.storage.read(INDEX_FILE)
    read = read_trusted if checkpoint.options.allow_pickle else read_pickle
    root = read(data, metadata_classes(), what=where)
    try:
        return _parse(root)
    except (ValueError, TypeError, KeyError) as error:
        fix = "It was damaged or made by another program; load another checkpoint."
        what = f"open: {where!r} is not sound"
        raise CorruptCheckpoint(error_text(what, found=str(error)[:300] or type(error).__name__, fix=fix)) from error


def _parse(root: Any) -> MetadataFile:
    if not (is_a(root, "Metadata") or is_a(root, "MCoreMetadata")):
        raise ValueError(f"{_kind(root)} where Metadata should be")
    entries, stored = field_of(root, "state_dict_metadata"), field_of(root, "storage_data")
    if not isinstance(entries, dict) or not isinstance(stored, dict):
        raise ValueError("no state_dict_metadata or storage_data")
    places = _places(stored)
    flat = field_of(root, "mcore_data")
    tensors, values = {}, {}
    for key, entry in entries.items():
        if type(key) is not str or not key:
            raise ValueError(f"a key that isn't a text, but {_kind(key)}")
        if is_a(entry, "TensorStorageMetadata"):
            tensors[key] = _tensor(key, entry, places, flat)
        elif is_a(entry, "BytesStorageMetadata"):
            values[key] = _place_of(places, key, None)
        else:
            raise ValueError(f"{key!r}: {_kind(entry)}")
    return MetadataFile(tensors, values, _paths(field_of(root, "planner_data")))


def _tensor(key: str, entry: Any, places: Mapping[Any, Place], flat: Any) -> TensorEntry:
    chunks = field_of(entry, "chunks")
    if not isinstance(chunks, list) or not all(is_a(chunk, "ChunkStorageMetadata") for chunk in chunks):
        raise ValueError(f"{key!r}: its chunks are {_kind(chunks)}")
    # A chunk that is listed twice is stored once. One without elements may have another one's offset, which is kept.
    boxes: dict[Ints, Ints] = {}
    for chunk in chunks:
        offset, size = chunk.state["offsets"], chunk.state["sizes"]
        if 0 not in size or offset not in boxes:
            boxes[offset] = size
    shape = field_of(entry, "size")
    _check_ints(key, [shape, *boxes, *boxes.values()])
    found = [_place_of(places, key, offset) for offset in boxes]
    dtype = _dtype(field_of(entry, "properties"))
    return TensorEntry(dtype, shape, list(boxes), list(boxes.values()), found, _grid_shape(key, flat))


def _check_ints(key: str, rows: list[Any]) -> None:
    axes = len(rows[0]) if type(rows[0]) is tuple else -1
    if axes > _MOST_AXES or not all(type(row) is tuple and len(row) == axes for row in rows):
        raise ValueError(f"{key!r}: its chunks don't have its axes")
    if not {type(number) for number in chain.from_iterable(rows)} <= {int}:
        raise ValueError(f"{key!r}: its sizes aren't whole numbers")


def _dtype(properties: Any) -> torch.dtype | None:
    state = properties.state if is_a(properties, "TensorProperties") else None
    first = state[0] if isinstance(state, tuple) and state else field_of(properties, "dtype")
    if isinstance(first, torch.dtype):
        return first
    if isinstance(first, Stub):
        return None
    raise ValueError(f"{_kind(first)} where a dtype should be")


def _grid_shape(key: str, flat: Any) -> Ints | None:
    """Return the true shape of a tensor that is stored as flat ranges of cells, as Megatron-Core 0.8 to 0.15 did."""
    data = flat.get(key) if isinstance(flat, dict) else None
    shape = data.get("nd_reformulated_orig_global_shape") if isinstance(data, dict) else None
    if shape is None:
        return None
    _check_ints(key, [tuple(shape)])
    return tuple(shape)


def _places(stored: dict[Any, Any]) -> dict[tuple[Any, Any], Place]:
    """Return where each archive lies, by key and offset."""
    places = {}
    for index, info in stored.items():
        if not is_a(index, "MetadataIndex") or not is_a(info, "_StorageInfo"):
            raise ValueError(f"{_kind(index)} and {_kind(info)} in storage_data")
        state = info.state
        file, byte, length = state["relative_path"], state["offset"], state["length"]
        if type(file) is not str or type(byte) is not int or type(length) is not int:
            raise ValueError("a place that isn't a file name with two numbers")
        refusal = _refusal(file, state.get("transform_descriptors"))
        places[index.state["fqn"], index.state.get("offset")] = Place(file, byte, length, refusal)
    return places


def _refusal(file: str, transforms: Any) -> str:
    if transforms:
        return f"it is stored through an extension, {transforms!r}"[:200]
    return "it is stored in safetensors, not as an archive of torch.save" if file.endswith(".safetensors") else ""


def _place_of(places: Mapping[Any, Place], key: str, offset: Ints | None) -> Place:
    found = places.get((key, offset))
    if found is None:
        raise ValueError(f"{key!r}: no place is given for {'it' if offset is None else f'its chunk at {offset}'}")
    return found


def _paths(planner: Any) -> dict[str, tuple[str | int, ...]] | None:
    if planner is None:
        return None
    if not isinstance(planner, dict):
        raise ValueError(f"{_kind(planner)} as planner_data")
    for path in planner.values():
        if (
            not isinstance(path, tuple)
            or not 0 < len(path) <= _DEEPEST
            or not {type(entry) for entry in path} <= {str, int}
        ):
            raise ValueError("a path of planner_data that isn't made of names and positions")
    return planner


def _kind(value: Any) -> str:
    return value.type_name if isinstance(value, Stub) else type(value).__name__

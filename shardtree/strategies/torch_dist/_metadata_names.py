"""What `.metadata`, a pickle, may name: none of it is imported, each becomes a stub; and reading it when trusted."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from ...codec.pickles import Constructor, Stub, inert
from ...errors import CorruptCheckpoint, error_text

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


def kind_of(value: Any) -> str:
    """Return what a value of `.metadata` is, for messages.

    Examples:
        >>> kind_of(Stub("some.Class")), kind_of([])
        ('some.Class', 'list')
    """
    return value.type_name if isinstance(value, Stub) else type(value).__name__

"""The names that `.metadata` may contain, of all the versions that wrote it: none is imported, each becomes a stub."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from ...codec import Constructor, Stub, inert

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
    """What names stand for. A dtype that this torch lacks is a stub: it only matters where its tensor is asked for."""

    def __missing__(self, key: tuple[str, str]) -> Any:
        module, name = key
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
    """Return what each name that `.metadata` may contain stands for: a dtype, a plain tuple, or a stub.

    Examples:
        >>> metadata_classes()["torch", "float32"]
        torch.float32
    """
    names = {(module, name): inert(f"{module}.{name}") for module, classes in _STUBS.items() for name in classes}
    names |= {(module, name): inert("path") for module in ("pathlib", "pathlib._local") for name in _PATHS}
    dtypes = {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    return _Names({**names, **dtypes, ("torch", "Size"): Constructor(_size)})


def is_a(value: Any, name: str) -> bool:
    """Return whether a value of `.metadata` is of a class of that name, whichever module it once was in.

    Examples:
        >>> is_a(Stub("torch.distributed.checkpoint.metadata.Metadata"), "Metadata")
        True
    """
    return isinstance(value, Stub) and value.type_name.rpartition(".")[2] == name


def field_of(value: Any, name: str) -> Any:
    """Return a field of an object of `.metadata`, None where it has none.

    Examples:
        >>> field_of(Stub("some.Class", state={"size": (2, 3)}), "size")
        (2, 3)
    """
    state = value.state if isinstance(value, Stub) else None
    return state.get(name) if isinstance(state, dict) else None

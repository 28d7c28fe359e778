"""`decode_archive`: the bytes of a torch.save archive, perhaps a hostile one, as a value."""

from __future__ import annotations

from collections.abc import Iterable
from io import BytesIO
from typing import Any

import torch

from ...errors import CheckpointingException, CorruptCheckpoint, UnsafeFile, error_text
from ..pickles import read_pickle
from ._named import NAMED
from ._numpy import NUMPY
from ._records import Archive, open_archive, slices
from ._storages import DTYPES, NO_VALUES, REBUILDERS, STORAGE_KINDS, loader
from ._types import constructors
from ._values import VALUES

_CLASSES: dict[tuple[str, str], Any] = {**VALUES, **NAMED, **NUMPY, **REBUILDERS, **STORAGE_KINDS, **DTYPES}

_FIX = (
    "If it is an enum, a dataclass or a named tuple, pass the class in types=(...); otherwise allow_pickle=True is the "
    "only way to read it, and runs whatever code it brings; only if you trust its writer."
)


def decode_archive(
    data: bytes | bytearray | memoryview, *, what: str, types: Iterable[type] = (), allow_pickle: bool = False
) -> Any:
    """Return the value that torch.save was given; the bytes may come from anyone.

    Nothing is imported because the bytes name it. Members of Megatron-Core's enums and its `OptimizerConfig` come back
    as `Record`s, unless `types` has the class. Tensors and parameters come back as plain tensors on the CPU that
    need no gradient, with their strides, and share memory where they did. Every record's CRC32 is checked.

    Args:
        data: a whole archive. The value shares no memory with it.
        what: the archive, for messages.
        types: enums, dataclasses and named tuples that may be in it; their `__init__` isn't run.
        allow_pickle: where that isn't enough, unpickle it. Only for files whose writer you trust.

    Raises:
        CorruptCheckpoint: the bytes aren't such an archive, or not those that were written.
        UnsafeFile: it names something that isn't data, and `allow_pickle` isn't given.
        UnsupportedValue: a class in `types` isn't what was stored, or a tensor is quantised, sparse or nested.

    Examples:
        >>> from shardtree.codec import encode_archive
        >>> decode_archive(encode_archive({"step": 7, "rng": torch.arange(3)}), what="example")
        {'step': 7, 'rng': tensor([0, 1, 2])}
    """
    classes = {**_CLASSES, **constructors(types)}
    try:
        archive = _checked(data, what)
    except UnsafeFile:
        if not allow_pickle:
            raise
        return _unpickled(data, what)
    load = loader(archive.data)
    try:
        pickled = archive.data("data.pkl")
        return read_pickle(pickled, classes, what=what, persistent_load=load, fix=_FIX, refused=NO_VALUES)
    except CheckpointingException:
        if not allow_pickle:
            raise
    return _unpickled(data, what)


def _checked(data: bytes | bytearray | memoryview, what: str) -> Archive:
    archive = open_archive(slices(data), memoryview(data).nbytes, what)
    for name in archive.records:
        archive.checked(name)
    return archive


def _unpickled(data: bytes | bytearray | memoryview, what: str) -> Any:
    try:
        return torch.load(BytesIO(data), map_location="cpu", weights_only=False)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise CorruptCheckpoint(error_text(f"{what}: it can't be unpickled: {reason}")) from error

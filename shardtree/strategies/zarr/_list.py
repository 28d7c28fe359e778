"""Which files a folder of zarr arrays consists of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from ...storage import Storage
from .._manifest import MANIFEST_FILE
from .._values import Checkpoint
from ..base import StrategyAction, register_default_strategy
from ._common import BACKEND, VERSION
from ._folder import find_arrays
from ._legacy import VERSION as LEGACY
from ._v3 import NODE_FILE

_NODES = (NODE_FILE, ".zarray", ".zattrs", ".zgroup", ".zmetadata")
_CHUNK_PART = re.compile(r"c|(c\.)?\d+(\.\d+)*")
_DEEPEST = 64


@register_default_strategy(StrategyAction.LIST_FILES, BACKEND, VERSION)
@register_default_strategy(StrategyAction.LIST_FILES, BACKEND, LEGACY)
def list_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names of the arrays' metadata and chunks, of the groups' metadata, and of objects' files.

    Raises:
        CorruptCheckpoint: the metadata of an array isn't sound.
    """
    storage = checkpoint.storage
    arrays, objects = find_arrays(storage)
    folders = {array.name for array in arrays}
    groups = {str(above) for name in folders for above in PurePosixPath(name).parents} - {"."}
    nodes = [f"{folder}/{node}" for folder in sorted(folders | groups) for node in _NODES]
    chunks = [name for folder in sorted(folders) for name in _chunks(storage, folder)]
    return (*_NODES, MANIFEST_FILE, *nodes, *chunks, *(name for _, name, _ in objects))


def _chunks(storage: Storage, folder: str, depth: int = 0) -> Iterator[str]:
    for last in storage.names(folder):
        name = f"{folder}/{last}"
        if _CHUNK_PART.fullmatch(last) is None:
            continue
        if storage.is_folder(name) and depth < _DEEPEST:
            yield from _chunks(storage, name, depth + 1)
        else:
            yield name

"""Recognition of torch_checkpointing's folders, and of each file's item and rank, by file names."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...kit import Fields, Storage, fields_of_backend

BACKEND, VERSION = "torch_checkpointing", 1
METADATA = "metadata.pkl"
_NAME = re.compile(r"(.+)_(0|[1-9]\d{0,8})\.pt", re.DOTALL)


def recognize(storage: Storage) -> Fields | None:
    """Return the fields that name the backend, for a folder of torch_checkpointing; None for anything else.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> recognize(MemoryStorage()) is None
        True
    """
    if storage.length("") is not None:
        return None
    names = storage.names()
    items = by_item(names)
    # Not every save writes metadata.pkl. Without it, only names tell: each rank must have a file of some item.
    ranks = {rank for item in items.values() for rank in item}
    has_all_ranks = bool(ranks) and ranks == set(range(len(ranks))) and all(0 in item for item in items.values())
    if METADATA not in names and not has_all_ranks:
        return None
    return fields_of_backend(BACKEND, VERSION)


def by_item(names: Iterable[str]) -> dict[str, dict[int, str]]:
    """Return the file names of the form <item>_<rank>.pt, by item and rank; other names are left out.

    Examples:
        >>> by_item(["model_0.pt", "model_1.pt", "lr_scheduler_0.pt", "notes.txt"])
        {'model': {0: 'model_0.pt', 1: 'model_1.pt'}, 'lr_scheduler': {0: 'lr_scheduler_0.pt'}}
    """
    files: dict[str, dict[int, str]] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is not None:
            files.setdefault(match[1], {})[int(match[2])] = name
    return files

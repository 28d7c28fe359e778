"""Which files of a folder are which rank's items: by their names, and by metadata.pkl where there is one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...codec.pickles import read_pickle
from ...errors import CorruptCheckpoint, UnsupportedValue, error_text
from ...storage import Storage
from .._values import Fields, fields_of_backend
from ..archives import ValueAt

BACKEND, VERSION = "torch_checkpointing", 1
METADATA, PATTERN = "metadata.pkl", "*_0.pt"
_NAME = re.compile(r"(.+)_(0|[1-9]\d{0,8})\.pt", re.DOTALL)
_TORCH = "TorchSerialization"


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """What a folder's names, and its metadata.pkl, say.

    Attributes:
        files: by item, the file of each rank that has one, by rank.
        boxes: by item and path, as JSON, what metadata.pkl says of tensors that are no DTensors but parts of a global
            one: by rank, the global shape, and its boxes: their offsets in that, and in the rank's tensor, and shapes.
    """

    files: Mapping[str, Mapping[int, str]]
    boxes: Mapping[tuple[str, str], Mapping[int, ValueAt]]


def recognize(storage: Storage) -> Fields | None:
    """Return the fields of metadata.json for a folder of items' files; None for anything else.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> recognize(MemoryStorage()) is None
        True
    """
    if storage.length("") is not None:
        return None
    names = storage.names()
    items = by_item(names)
    # Without metadata.pkl, which not each save writes, only names say it: each rank has a file of some item.
    ranks = {rank for item in items.values() for rank in item}
    named = bool(ranks) and ranks == set(range(len(ranks))) and all(0 in item for item in items.values())
    if METADATA not in names and not named:
        return None
    return fields_of_backend(BACKEND, VERSION)


def by_item(names: Iterable[str]) -> dict[str, dict[int, str]]:
    """Return the files that are named as items of ranks are.

    Examples:
        >>> by_item(["model_0.pt", "model_1.pt", "lr_scheduler_0.pt", "notes.txt"])
        {'model': {0: 'model_0.pt', 1: 'model_1.pt'}, 'lr_scheduler': {0: 'lr_scheduler_0.pt'}}
    """
    found: dict[str, dict[int, str]] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is not None:
            found.setdefault(match[1], {})[int(match[2])] = name
    return found


def listed(storage: Storage) -> Listing:
    """Return which files there are, and should be.

    Raises:
        CorruptCheckpoint: the save wasn't finished; metadata.pkl contradicts itself; a rank's file is missing.
        UnsafeFile: metadata.pkl names something that isn't data.
        UnsupportedValue: an item was written by another serialization than torch.save.
    """
    where = storage.where()
    if where.replace("\\", "/").rstrip("/").rpartition("/")[2].startswith("tmp_"):
        fix = "Take an earlier step. If you know that each rank had finished, give the folder its final name."
        found = "a folder named tmp_…, from which torch_checkpointing takes the name away when all ranks have written"
        raise CorruptCheckpoint(error_text(f"open: the save of {where!r} wasn't finished", found=found, fix=fix))
    names = storage.names()
    files: dict[str, dict[int, str]] = by_item(names)
    boxes: dict[tuple[str, str], dict[int, ValueAt]] = {}
    size = 0
    if METADATA in names:
        place = storage.where(METADATA)
        saved = ValueAt(read_pickle(storage.read(METADATA), {}, what=f"open: {place!r}"), place)
        size = saved.member("world_size").count()
        if saved.member("version", "1.0").of(str) != "2.0":
            fix = "Load it with torch_checkpointing, and save it anew."
            raise UnsupportedValue(error_text(f"open: {place!r} is of version 1.0 of its format", fix=fix))
        for item, one in saved.member("metadata").members(str).items():
            layouts = one.member("rank_to_layout_info").members(int, str)
            files[item] = {int(rank): _file(item, int(rank), layout) for rank, layout in layouts.items()}
            for path, groups in one.member("nested_path_to_metadata").members(str).items():
                boxes |= {(item, path): held} if (held := _boxes(groups)) else {}
    size = size or 1 + max((rank for ranks in files.values() for rank in ranks), default=-1)
    # An item may be one rank's alone; one that several ranks have, each has.
    missing = [
        f"{item}_{rank}.pt"
        for item, ranks in files.items()
        for rank in range(min(size, 100_000))
        if len(ranks) > 1 and rank not in ranks
    ]
    if missing:
        what, fix = f"open: {where!r} lacks ranks' files", "Copy every rank's file, or load another checkpoint."
        raise CorruptCheckpoint(error_text(what, offenders=missing, fix=fix))
    return Listing({item: dict(sorted(ranks.items())) for item, ranks in sorted(files.items())}, boxes)


def _file(item: str, rank: int, layout: ValueAt) -> str:
    if layout.value is None:
        return f"{item}_{rank}.pt"
    kind = layout.member("serialization_format").member("type").of(str)
    name: str = layout.member("file_path").of(str)
    if kind != _TORCH:
        fix = "Load it with torch_checkpointing; of its serializations torch.save's is read here."
        raise UnsupportedValue(error_text(f"open: {layout.file!r}: {name!r} is written by {kind}", fix=fix))
    return name


def _boxes(groups: ValueAt) -> dict[int, ValueAt]:
    """Return by rank what is said of a tensor that isn't a DTensor; a DTensor says itself where it lies."""
    found: dict[int, ValueAt] = {}
    for group in groups.items():
        sharding = group.member("sharding_metadata")
        if sharding.member("type").of(str) == "default_tensor_v1":
            found |= {rank.count(): sharding.member("data") for rank in group.member("ranks").items()}
    return found

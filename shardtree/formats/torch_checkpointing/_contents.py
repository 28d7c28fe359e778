"""Contents of torch_checkpointing's folders, with a file of torch.save for each rank and item (entry of the state)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from ...errors import CorruptCheckpoint, TreePath, UnsupportedValue, error_text, missing_numbers, rank_text
from ...kit import HOLE, Checkpoint, ShardedObject, Storage, diff
from ..archives import StoredDTensor, StoredTensor, box_of
from ..pickles import contents, read_pickle
from ..rank_archives import (
    ArchiveFile,
    Contents,
    Tensors,
    ValueAt,
    check_rank,
    contents_of,
    local_part,
    piece_of,
    place_parts,
    read_archives,
    rows_from_contents,
)
from ._listing import METADATA, by_item

_TORCH = "TorchSerialization"


PathAt = tuple[str, str]
"""Name of an item, and a path in it as JSON."""


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """Files and tensors of a folder, according to its file names and its metadata.pkl.

    An item is an entry of the saved state, such as "model".

    Attributes:
        files: Name of each item's file, by item and rank.
        boxes: Descriptions in metadata.pkl, by (item, path) and then by rank, for global tensors whose parts are stored
            as plain tensors. A description has the global shape, and lists the boxes in the rank's tensor: offset in
            the global tensor, offset in the rank's tensor, and shape.
        described: Ranks whose files must contain a tensor according to metadata.pkl, by (item, path).
    """

    files: Mapping[str, Mapping[int, str]]
    boxes: Mapping[PathAt, Mapping[int, ValueAt]]
    described: Mapping[PathAt, frozenset[int]] = field(default_factory=dict)


def listed(storage: Storage) -> Listing:
    """Return the listing of a folder, after checking that each rank has its files.

    Raises:
        CorruptCheckpoint: The save wasn't finished; metadata.pkl contradicts itself; a rank's file is missing.
        UnsafeFile: metadata.pkl names something that isn't data.
        UnsupportedValue: An item was written by another serialization than torch.save.
    """
    where = storage.where()
    if where.replace("\\", "/").rstrip("/").rpartition("/")[2].startswith("tmp_"):
        fix = "Take an earlier step. If you know that all ranks had finished, give the folder its final name."
        found = "a folder named tmp_…, which torch_checkpointing renames once all ranks have written"
        raise CorruptCheckpoint(error_text(f"open: the save of {where!r} was not finished", found=found, fix=fix))
    names = set(storage.names())
    files: dict[str, dict[int, str]] = by_item(names)
    boxes: dict[PathAt, dict[int, ValueAt]] = {}
    described: dict[PathAt, frozenset[int]] = {}
    listed_ranks: dict[str, dict[int, str]] = {}
    size = 0
    if METADATA in names:
        metadata = _metadata(storage)
        size = metadata.member("world_size").count()
        for item, description in metadata.member("metadata").members(str).items():
            by_rank_name = description.member("rank_to_layout_info").members(int, str)
            layouts = {int(rank): layout for rank, layout in by_rank_name.items()}
            if named := {rank: _file(item, rank, layout) for rank, layout in layouts.items()}:
                listed_ranks[item] = named
                # All ranks are listed, even those without the item: a rank without a layout may have no file of it.
                there = {rank: name for rank, name in named.items() if layouts[rank].value is not None or name in names}
                files[item] = there or named
            for path, groups in description.member("nested_path_to_metadata").members(str).items():
                boxes |= {(item, path): by_rank} if (by_rank := _boxes(groups)) else {}
                described[item, path] = _ranks(groups)
    size = size or 1 + max((rank for ranks in files.values() for rank in ranks), default=-1)
    _check_files(where, files | listed_ranks, size)
    return Listing({item: dict(sorted(ranks.items())) for item, ranks in sorted(files.items())}, boxes, described)


def _metadata(storage: Storage) -> ValueAt:
    """Return the contents of metadata.pkl."""
    place = storage.where(METADATA)
    metadata = ValueAt(read_pickle(storage.read(METADATA), {}, what=f"open: {place!r}"), place)
    if metadata.member("version", "1.0").of(str) != "2.0":
        fix = "Load it with torch_checkpointing, and save it again."
        raise UnsupportedValue(error_text(f"open: {place!r} has version 1.0 of its format", expected="2.0", fix=fix))
    return metadata


def _check_files(where: str, files: Mapping[str, Mapping[int, str]], size: int) -> None:
    """Raise if a rank's file is missing."""
    # An item belongs either to one rank or to all ranks.
    present = {item: sum(rank < size for rank in ranks) for item, ranks in files.items() if len(ranks) > 1}
    count = sum(size - there for there in present.values())
    if count:
        # A generator makes only the names that are shown: metadata.pkl may claim any number of ranks and items.
        missing = (
            f"{item}_{rank}.pt" for item, there in present.items() for rank in missing_numbers(files[item], there, size)
        )
        heading, fix = f"open: {where!r} lacks ranks' files", "Copy every rank's file, or load another checkpoint."
        raise CorruptCheckpoint(error_text(heading, offenders=missing, count=count, fix=fix))


def _file(item: str, rank: int, layout: ValueAt) -> str:
    if layout.value is None:
        return f"{item}_{rank}.pt"
    kind = layout.member("serialization_format").member("type").of(str)
    name: str = layout.member("file_path").of(str)
    if kind != _TORCH:
        fix = "Load it with torch_checkpointing."
        heading = f"open: {layout.file!r}: {name!r} has another serialization than torch.save"
        raise UnsupportedValue(error_text(heading, found=kind[:100], expected=_TORCH, fix=fix))
    return name


def _boxes(groups: ValueAt) -> dict[int, ValueAt]:
    """Return metadata.pkl's description of the boxes that each rank has of a tensor, by rank; {} for a DTensor.

    A rank's plain tensor may contain several boxes of the global tensor. A DTensor's placements describe its box.

    Args:
        groups: Entries of metadata.pkl for the tensor, each for several ranks, with a description of their sharding.
    """
    boxes: dict[int, ValueAt] = {}
    for group in groups.items():
        sharding = group.member("sharding_metadata")
        if sharding.member("type").of(str) == "default_tensor_v1":
            boxes |= {rank.count(): sharding.member("data") for rank in group.member("ranks").items()}
    return boxes


def _ranks(groups: ValueAt) -> frozenset[int]:
    """Return the ranks whose files must contain a tensor; of ranks with replicas, only the first must.

    Args:
        groups: Entries of metadata.pkl for the tensor, each for several ranks, with a description of their sharding.
    """
    holders = set[int]()
    for group in groups.items():
        ranks = {rank.count() for rank in group.member("ranks").items()}
        holders |= {min(ranks)} if ranks and _is_replicated(group.member("sharding_metadata")) else ranks
    return frozenset(holders)


def _is_replicated(sharding: ValueAt) -> bool:
    """Return whether metadata.pkl describes a tensor as a DTensor that is replicated along all mesh axes."""
    # A plain tensor is described so by the first rank for all; with pipeline parallelism, other ranks may lack it.
    if sharding.member("type").of(str) != "DTensorShardingMetadata":
        return False
    placements = sharding.member("data").member("placements", ()).items()
    kinds = {placement.member("type").of(str) for placement in placements}
    return kinds == {"Replicate"}


RankPart = tuple[int, int, StoredTensor | StoredDTensor]
"""A rank, the number of its file, and its part of a tensor."""


def read_contents(checkpoint: Checkpoint) -> Contents:
    """Return the contents of the files of all ranks and items, after comparing tensors that several ranks have.

    An item is an entry of the saved state, such as "model".

    Raises:
        CorruptCheckpoint: The save wasn't finished, a rank's file or a described tensor is missing, a file is named
            twice, or the files contradict each other.
        UnsafeFile: A file names something that isn't data.
        UnsupportedValue: An item was written by another serialization than torch.save.
    """
    listing = listed(checkpoint.storage)
    files = read_archives(checkpoint, [name for ranks in listing.files.values() for name in ranks.values()], {})
    numbered_files = iter(enumerate(files))
    tensors, common, objects = Tensors(), dict[str, Any](), dict[str, Any]()
    holders: dict[PathAt, set[int]] = {}
    for item, ranks in listing.files.items():
        by_path, others = _by_path(item, [(rank, *next(numbered_files)) for rank in ranks])
        for path, parts in by_path.items():
            key = ".".join([item, *map(str, path)])
            place = item, json.dumps(list(path), separators=(",", ":"), default=str)
            holders[place] = {rank for rank, _, _ in parts}
            boxes = listing.boxes.get(place)
            if boxes is None:
                place_parts(checkpoint, key, [part[1:] for part in parts], tensors, files)
            else:
                _place_boxes(key, parts, boxes, tensors, files)
        first = next(iter(others.values()))
        if any(diff(first, other) for other in others.values()):
            cells = {rank: ShardedObject(item, None, (len(others),), (cell,)) for cell, rank in enumerate(others)}
            objects |= {cells[rank].unique_key: {} if value is HOLE else value for rank, value in others.items()}
        elif first is not HOLE:
            common[item] = first
    _check_described(checkpoint.storage, listing, holders)
    return contents_of(files, tensors, common=common, objects=objects, where=checkpoint.storage.where)


def _by_path(
    item: str, files: Sequence[tuple[int, int, ArchiveFile]]
) -> tuple[dict[TreePath, list[RankPart]], dict[int, Any]]:
    """Return the ranks' parts of an item's tensors, by path, and the rest of the item without tensors, by rank.

    Args:
        item: Name of the item, for errors.
        files: Rank, file number and file of each rank that has the item.
    """
    by_path: dict[TreePath, list[RankPart]] = {}
    others: dict[int, Any] = {}
    for rank, number, file in files:
        for path, tensor in _tensors(file.value, ()):
            check_rank(file, rank, ".".join([item, *map(str, path)]), tensor)
            by_path.setdefault(path, []).append((rank, number, tensor))
        others[rank] = _without_tensors(file.value)
        _refuse_hidden(others[rank], file.where)
    return by_path, others


def _check_described(storage: Storage, listing: Listing, holders: Mapping[PathAt, Set[int]]) -> None:
    """Raise if a rank's file lacks a tensor that metadata.pkl describes; no other check would find this.

    Args:
        storage: Storage of the folder.
        listing: Listing of the folder.
        holders: Ranks whose files contain a tensor, by (item, path); an item is an entry of the saved state.
    """
    wrong = []
    for (item, path), ranks in listing.described.items():
        there = holders.get((item, path), frozenset())
        if lacking := ranks - there:
            wrong.append(f"{path[:200]} in {item[:200]!r}: not in the files of {rank_text(sorted(lacking))}")
        elif not there:
            wrong.append(f"{path[:200]} in {item[:200]!r}: in no file")
    if wrong:
        heading = f"open: files lack tensors that {storage.where(METADATA)!r} describes"
        fix = "A file belongs to another save, or was changed; copy all files of one save, or load another checkpoint."
        raise CorruptCheckpoint(error_text(heading, offenders=wrong, fix=fix))


def _tensors(value: Any, path: TreePath) -> Iterator[tuple[TreePath, StoredTensor | StoredDTensor]]:
    if isinstance(value, (StoredTensor, StoredDTensor)):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        for at, member in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(member, (*path, at))


def _without_tensors(value: Any) -> Any:
    """Return a value without its tensors; `HOLE` if nothing is left.

    In lists and tuples `HOLE` replaces a tensor; dicts lose the entries.
    """
    if isinstance(value, (StoredTensor, StoredDTensor)):
        return HOLE
    if isinstance(value, dict):
        entries = {key: plain for key, member in value.items() if (plain := _without_tensors(member)) is not HOLE}
        return entries if entries or not value else HOLE
    if type(value) in (list, tuple):
        items = [_without_tensors(member) for member in value]
        return HOLE if items and all(item is HOLE for item in items) else type(value)(items)
    return value


def _refuse_hidden(value: Any, where: str) -> None:
    """Raise if a value has tensors that have no path: in a set, as a dict's key, in an object.

    Raises:
        UnsupportedValue: It has such tensors.
    """
    left, ids = [value], set[int]()
    while left:
        node = left.pop()
        if isinstance(node, (StoredTensor, StoredDTensor)):
            heading = f"open: {where!r} has tensors outside of dicts, lists and tuples"
            fix = "Load it with torch_checkpointing, and save these tensors in a dict."
            raise UnsupportedValue(error_text(heading, found="a tensor in a set or an object, or as a key", fix=fix))
        if id(node) not in ids:
            ids.add(id(node))
            left.extend(contents(node))


def _place_boxes(
    key: str, parts: Sequence[RankPart], boxes: Mapping[int, ValueAt], tensors: Tensors, files: Sequence[ArchiveFile]
) -> None:
    """Add a tensor whose boxes metadata.pkl describes; if it cannot be read, add the reason.

    Args:
        key: Key of the tensor.
        parts: Rank, file number and stored tensor of each part.
        boxes: Description of the boxes in a rank's part, by rank, from metadata.pkl.
        tensors: Tensors of the checkpoint, collected so far; changed in place.
        files: Files of the checkpoint, by number.
    """
    whole, dtype = next(iter(boxes.values())).member("global_shape").shape(), local_part(parts[0][2]).dtype
    tensors.add(key, dtype, whole)
    places = dict[tuple[tuple[int, ...], ...], tuple[int, StoredTensor]]()
    for rank, number, tensor in parts:
        if rank not in boxes or not isinstance(tensor, StoredTensor) or tensor.dtype != dtype:
            tensors.refused[key] = f"{files[number].where!r} has it in another form than metadata.pkl describes"
            return
        names = ("global_offsets", "local_offsets", "local_sizes")
        rows = [[numbers.shape() for numbers in boxes[rank].member(name).items()] for name in names]
        if boxes[rank].member("global_shape").shape() != whole or len({*map(len, rows)}) > 1:
            tensors.refused[key] = f"metadata.pkl contradicts itself about {files[number].where!r}"
            return
        for offset, inner, size in zip(*rows, strict=True):
            if not _is_inside(inner, size, tensor.shape) or not _is_inside(offset, size, whole):
                tensors.refused[key] = f"{files[number].where!r} has boxes of it that are not inside the rank's tensor"
                return
            first, other = places.setdefault((offset, size), (number, tensor))
            if first == number:
                tensors.pieces.append(piece_of(key, number, box_of(tensor, (inner, size)), offset))
            elif tensor.shape != size or other.shape != size:  # Checksums are only known for whole tensors.
                tensors.refused[key] = f"{files[number].where!r} has a copy of a part of {files[first].where!r}"
                return
            else:
                tensors.add_copy([key], other, tensor, (files[first].where, files[number].where), offset)


def _is_inside(offset: Sequence[int], size: Sequence[int], whole: Sequence[int]) -> bool:
    if not len(offset) == len(size) == len(whole):
        return False
    return all(low + length <= end for low, length, end in zip(offset, size, whole, strict=True))


load_common, load_sharded, load_objects, load_metadata, verify, resolve = rows_from_contents(read_contents)

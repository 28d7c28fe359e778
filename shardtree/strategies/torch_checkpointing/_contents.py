"""What is in the items' files: tensors by item and path; other values as the common state, or as each rank's object."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from ...codec.archives import StoredDTensor, StoredTensor
from ...codec.pickles import contents
from ...errors import TreePath, UnsupportedValue, error_text
from ...mapping import ShardedObject
from ...trees import HOLE, diff
from .._values import Checkpoint
from ..archives import (
    ArchiveFile,
    Contents,
    Piece,
    Tensors,
    ValueAt,
    check_rank,
    contents_of,
    local_part,
    place_parts,
    read_archives,
    rows_from_contents,
)
from ._listing import listed

Found = tuple[int, int, StoredTensor | StoredDTensor]
"""A rank, the number of its file, and what it has of a tensor."""


def read_contents(checkpoint: Checkpoint) -> Contents:
    """Return what is in the items' files, after comparing what several ranks have.

    Raises:
        CorruptCheckpoint: the save wasn't finished, a rank's file is missing, or the files contradict each other.
        UnsafeFile: a file names something that isn't data.
        UnsupportedValue: an item was written by another serialization than torch.save.
    """
    listing = listed(checkpoint.storage)
    files = read_archives(checkpoint, [name for ranks in listing.files.values() for name in ranks.values()], {})
    numbered = iter(enumerate(files))
    tensors, common, objects = Tensors(), dict[str, Any](), dict[str, Any]()
    for item, ranks in listing.files.items():
        found: dict[TreePath, list[Found]] = {}
        rest: dict[int, Any] = {}
        for rank in ranks:
            number, file = next(numbered)
            for path, tensor in _tensors(file.value, ()):
                check_rank(file, rank, ".".join([item, *map(str, path)]), tensor)
                found.setdefault(path, []).append((rank, number, tensor))
            rest[rank] = _without_tensors(file.value)
            _refuse_hidden(rest[rank], file.where)
        for path, held in found.items():
            key = ".".join([item, *map(str, path)])
            boxes = listing.boxes.get((item, json.dumps(list(path), separators=(",", ":"), default=str)))
            if boxes is None:
                place_parts(checkpoint, key, [each[1:] for each in held], tensors, files)
            else:
                _place_boxes(key, held, boxes, tensors, files)
        first = next(iter(rest.values()))
        if any(diff(first, other) for other in rest.values()):
            cells = {rank: ShardedObject(item, None, (len(rest),), (cell,)) for cell, rank in enumerate(rest)}
            objects |= {cells[rank].unique_key: {} if value is HOLE else value for rank, value in rest.items()}
        elif first is not HOLE:
            common[item] = first
    return contents_of(files, tensors, common=common, objects=objects, where=checkpoint.storage.where)


def _tensors(value: Any, path: TreePath) -> Iterator[tuple[TreePath, StoredTensor | StoredDTensor]]:
    if isinstance(value, (StoredTensor, StoredDTensor)):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        for at, member in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(member, (*path, at))


def _without_tensors(value: Any) -> Any:
    """Return a value with holes for its tensors, and without what holds nothing else; a hole where all are tensors."""
    if isinstance(value, (StoredTensor, StoredDTensor)):
        return HOLE
    if isinstance(value, dict):
        members = {key: rest for key, member in value.items() if (rest := _without_tensors(member)) is not HOLE}
        return members if members or not value else HOLE
    if type(value) in (list, tuple):
        rests = [_without_tensors(member) for member in value]
        return HOLE if rests and all(rest is HOLE for rest in rests) else type(value)(rests)
    return value


def _refuse_hidden(value: Any, where: str) -> None:
    """Raise if a value has tensors where no path leads: in a set, as a dict's key, in an object.

    Raises:
        UnsupportedValue: it has.
    """
    left, seen = [value], set[int]()
    while left:
        one = left.pop()
        if isinstance(one, (StoredTensor, StoredDTensor)):
            what = f"open: {where!r} has tensors outside of dicts, lists and tuples"
            fix = "Load it with torch_checkpointing, and save these tensors in a dict."
            raise UnsupportedValue(error_text(what, found="one in a set or an object, or as a key", fix=fix))
        if id(one) not in seen:
            seen.add(id(one))
            left.extend(contents(one))


def _place_boxes(
    key: str, held: Sequence[Found], boxes: Mapping[int, ValueAt], tensors: Tensors, files: Sequence[ArchiveFile]
) -> None:
    """Add a tensor of which ranks have boxes that metadata.pkl describes; or the reason why it can't be read."""
    whole, dtype = next(iter(boxes.values())).member("global_shape").shape(), local_part(held[0][2]).dtype
    tensors.add(key, dtype, whole)
    placed = dict[tuple[tuple[int, ...], ...], tuple[int, StoredTensor]]()
    for rank, number, tensor in held:
        if rank not in boxes or not isinstance(tensor, StoredTensor) or tensor.dtype != dtype:
            tensors.refused[key] = f"{files[number].where!r} has another kind of it than metadata.pkl says"
            return
        names = ("global_offsets", "local_offsets", "local_sizes")
        rows = [[each.shape() for each in boxes[rank].member(name).items()] for name in names]
        if boxes[rank].member("global_shape").shape() != whole or len({*map(len, rows)}) > 1:
            tensors.refused[key] = f"what metadata.pkl says of {files[number].where!r} contradicts itself"
            return
        for offset, inner, size in zip(*rows, strict=True):
            if not _is_rows(tensor, inner, size) or not _is_inside(offset, size, whole):
                tensors.refused[key] = f"{files[number].where!r} has boxes of it that aren't rows of the rank's tensor"
                return
            first, other = placed.setdefault((offset, size), (number, tensor))
            if first == number:
                begin = tensor.begin + (inner[0] * prod(size[1:]) if inner else 0) * dtype.itemsize
                tensors.pieces.append(Piece(key, number, begin, offset, size))
            elif tensor.shape != size or other.shape != size:  # checksums are of whole tensors
                tensors.refused[key] = f"{files[number].where!r} has a copy of a part of {files[first].where!r}"
                return
            else:
                tensors.add_copy([key], other, tensor, (files[first].where, files[number].where), offset)


def _is_rows(tensor: StoredTensor, inner: Sequence[int], size: Sequence[int]) -> bool:
    fits = len(inner) == len(size) == len(tensor.shape) and tuple(size[1:]) == tensor.shape[1:]
    return fits and tensor.is_row_major and not any(inner[1:]) and _is_inside(inner, size, tensor.shape)


def _is_inside(offset: Sequence[int], size: Sequence[int], whole: Sequence[int]) -> bool:
    if not len(offset) == len(size) == len(whole):
        return False
    return all(low + length <= end for low, length, end in zip(offset, size, whole, strict=True))


load_common, load_sharded, load_objects, load_metadata, verify, resolve = rows_from_contents(read_contents)

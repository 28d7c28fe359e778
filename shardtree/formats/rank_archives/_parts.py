"""Tensors with parts in several ranks' files: a part's box follows from the mesh position; equal boxes are copies."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ...errors import CorruptCheckpoint, error_text
from ...kit import Checkpoint
from ..archives import DTensorParts, StoredDTensor, StoredTensor
from ._contents import Tensors, piece_of
from ._files import ArchiveFile

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape."""


def chunk(length: int, pieces: int, number: int) -> tuple[int, int]:
    """Return the offset and the length of one piece of an axis that is cut as torch.chunk cuts it.

    Every piece has ceil(length / pieces) elements until fewer are left; the next piece has these, later pieces none.

    Args:
        length: Length of the axis.
        pieces: Number of pieces.
        number: Number of the piece, from 0.

    Examples:
        >>> [chunk(10, 4, number) for number in range(4)], [chunk(3, 4, number)[1] for number in range(4)]
        ([(0, 3), (3, 3), (6, 3), (9, 1)], [1, 1, 1, 0])
    """
    size = -(-length // pieces)
    begin = min(number * size, length)
    return begin, min(size, length - begin)


def placed_box(shape: tuple[int, ...], parts: DTensorParts) -> Box:
    """Return the box of a DTensor that a rank holds.

    Args:
        shape: Shape of the global tensor.
        parts: Placements of the tensor, and the rank's mesh position.

    Raises:
        ValueError: A placement is Partial, or the placements contradict each other or the shape.

    Examples:
        >>> from shardtree.formats.archives import Placement
        >>> rows, left = Placement("shard", 0), Placement("strided", 0, 2)
        >>> placed_box((8, 6), DTensorParts((rows,), (4,), (1,), 1))
        ((2, 0), (2, 6))
        >>> placed_box((8, 6), DTensorParts((left, rows), (2, 2), (1, 0), 2))  # FSDP2 over tensor parallelism
        ((2, 0), (2, 6))
    """
    offset, lengths = [0] * len(shape), list(shape)
    for axis in _in_order(parts, len(shape)):
        dim = parts.placements[axis].dim
        begin, lengths[dim] = chunk(lengths[dim], parts.sizes[axis], parts.position[axis])
        offset[dim] += begin
    return tuple(offset), tuple(lengths)


def _in_order(parts: DTensorParts, axes: int) -> list[int]:
    """Return the mesh axes that shard a tensor with `axes` axes, in the order in which they cut it."""
    cuts = [axis for axis, placement in enumerate(parts.placements) if placement.kind in ("shard", "strided")]
    for axis, placement in enumerate(parts.placements):
        if placement.kind == "partial":
            raise ValueError("a Partial placement: ranks hold terms of a sum, not parts of a tensor")
        if axis in cuts and not 0 <= placement.dim < axes:
            raise ValueError(f"a cut of axis {placement.dim} of a tensor with {axes} axes")
        # FSDP2 over tensor parallelism: its axis is to the left of the others, but cuts after them.
        right = [other for other in cuts if other > axis and parts.placements[other].dim == placement.dim]
        if placement.kind == "strided" and placement.split_factor != prod(parts.sizes[other] for other in right):
            raise ValueError(f"a _StridedShard with split_factor {placement.split_factor} left of {len(right)} cuts")
    plain = [axis for axis in cuts if parts.placements[axis].kind == "shard"]
    strided = [axis for axis in cuts if parts.placements[axis].kind == "strided"]
    return [*plain, *reversed(strided)]


RankPart = tuple[int, StoredTensor | StoredDTensor]
"""Number of a rank's file, and the rank's part of a tensor."""


def local_part(tensor: StoredTensor | StoredDTensor) -> StoredTensor:
    """Return a rank's part of a tensor as a standalone tensor."""
    return tensor.local if isinstance(tensor, StoredDTensor) else tensor


def check_rank(file: ArchiveFile, rank: int, key: str, tensor: StoredTensor | StoredDTensor) -> None:
    """Raise if the part of a tensor in a rank's file belongs to another rank.

    Raises:
        CorruptCheckpoint: The part's mesh names another rank.
    """
    if isinstance(tensor, StoredDTensor) and tensor.parts.rank not in (None, rank):
        heading = f"open: {file.where!r} is another rank's file"
        fix = "Files were renamed, exchanged or copied; copy each rank's own file, or load another checkpoint."
        part = f"rank {tensor.parts.rank}'s part of {key[:200]!r}"
        raise CorruptCheckpoint(error_text(heading, found=part, expected=f"rank {rank}'s part", fix=fix))


def place_parts(
    checkpoint: Checkpoint, key: str, ranks: Sequence[RankPart], tensors: Tensors, files: Sequence[ArchiveFile]
) -> None:
    """Add a tensor whose parts lie in ranks' files; if it cannot be read, add the reason.

    Args:
        checkpoint: The open checkpoint.
        key: Key of the tensor.
        ranks: File number and part of each rank that has a part.
        tensors: Tensors of the checkpoint, collected so far; changed in place.
        files: Files of the checkpoint, by number.
    """
    tensors.add(key, local_part(ranks[0][1]).dtype, ranks[0][1].shape)
    reason = _place(checkpoint, key, ranks, tensors, files)
    if reason:
        tensors.refused[key] = reason


def _place(
    checkpoint: Checkpoint, key: str, ranks: Sequence[RankPart], tensors: Tensors, files: Sequence[ArchiveFile]
) -> str:
    """Add each distinct box of a tensor as a piece, and further parts with the same box as its copies.

    Returns:
        Reason that the tensor cannot be read; empty if it can.
    """
    boxes: dict[Box, RankPart] = {}
    reason, first = "", ranks[0][1]
    first_where = checkpoint.storage.where(files[ranks[0][0]].name)
    for number, tensor in ranks:
        where = checkpoint.storage.where(files[number].name)
        if _kind(tensor) != _kind(first):
            reason = reason or f"{where!r} has {_shown(tensor)}, {first_where!r} {_shown(first)}"
            if isinstance(first, StoredTensor) and isinstance(tensor, StoredTensor):
                tensors.add_copy([key], first, tensor, (first_where, where))
            continue
        try:
            box = _box(tensor)
        except ValueError as error:
            return f"{where!r} has {error}"
        part = boxes.setdefault(box, (number, tensor))
        if part[0] == number or 0 in box[1]:
            continue
        places = checkpoint.storage.where(files[part[0]].name), where
        tensors.add_copy([key], local_part(part[1]), local_part(tensor), places, box[0])
    rows = [(box, part) for box, part in boxes.items() if 0 not in box[1]]
    tensors.pieces.extend(piece_of(key, number, local_part(tensor), offset) for (offset, _), (number, tensor) in rows)
    return reason


def _box(tensor: StoredTensor | StoredDTensor) -> Box:
    """Return the box of a rank's part: by its placements for a DTensor, else the whole tensor.

    Raises:
        ValueError: The part's shape differs from the box, or the placements are invalid.
    """
    local = local_part(tensor)
    whole = (0,) * len(tensor.shape), tensor.shape
    box = placed_box(tensor.shape, tensor.parts) if isinstance(tensor, StoredDTensor) else whole
    if local.shape != box[1]:
        raise ValueError(f"a part of shape {local.shape}, where its place on the mesh has {box[1]}")
    return box


def _kind(tensor: StoredTensor | StoredDTensor) -> tuple[object, ...]:
    return type(tensor), tensor.shape, local_part(tensor).dtype


def _shown(tensor: StoredTensor | StoredDTensor) -> str:
    kind = "a part of" if isinstance(tensor, StoredDTensor) else "a plain tensor"
    return f"{kind} {tensor.shape} {str(local_part(tensor).dtype).removeprefix('torch.')}"

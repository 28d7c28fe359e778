"""Encoding: a box of a weight's stored values or scales, computed from the weight's blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..core.geometry import slices
from ..core.lazy import Box
from ..errors import UnsupportedValue, error_text
from ._part import WINDOW, Part, inside, windows

Encode = Callable[[torch.Tensor, tuple[int, int]], tuple[torch.Tensor, ...]]
"""Function from float32 matrices of whole blocks, (..., rows, columns), and the block size, to a form's parts."""
Shape = tuple[int, ...]


def blocks_of(part: Part, block: tuple[int, int], whole: Shape, box: Box) -> Box:
    """Return the box of a weight from which a box of a stored tensor is computed: the smallest box of whole blocks.

    Args:
        part: Description of the stored tensor.
        block: Block size of the form; 0 means the whole axis.
        whole: Shape of the whole weight, oriented as stored.
        box: Box of the stored tensor.
    """
    front = len(whole) - 2
    starts, sizes = [*box.offset[:front]], [*box.shape[:front]]
    for axis, (step, side) in enumerate(zip(part.steps, block, strict=True), front):
        low, high = box.offset[axis] * step, (box.offset[axis] + box.shape[axis]) * step if step else whole[axis]
        starts.append(low // side * side if side else 0)
        sizes.append(min(whole[axis], -(-high // side) * side if side else whole[axis]) - starts[-1])
    return Box(tuple(starts), tuple(sizes))


def encoded(
    key: str, part: Part, number: int, block: tuple[int, int], encode: Encode, data: torch.Tensor, at: Box, box: Box
) -> torch.Tensor:
    """Return the elements of a box of a stored tensor, encoded from elements of the weight.

    Args:
        key: Key of the weight, for errors.
        part: Description of the stored tensor.
        number: Index of `part` among the parts of the form.
        block: Block size of the form.
        encode: Encoder of the form.
        data: Elements of the weight, transposed if the form stores weights transposed.
        at: Box of the weight that `data` fills, transposed likewise; it consists of whole blocks.
        box: Box to compute, in the stored tensor's own coordinates.

    Raises:
        UnsupportedValue: an element isn't finite; with it, all other elements of its block would be lost, too.
    """
    outer = part.box(*at)
    new = torch.empty(outer.shape, dtype=part.dtypes[0], device=data.device)
    # As many whole blocks as a window has room for: first along a row, then further rows of blocks.
    high, wide = (side or max(1, size) for side, size in zip(block, at.shape[-2:], strict=True))
    wide *= max(1, min(WINDOW // (high * wide), -(-at.shape[-1] // wide)))
    high *= max(1, WINDOW // (high * wide))
    for start, shape in windows(Box((0,) * len(at.shape), at.shape), high, wide):
        piece = data[slices(start, shape)].to(torch.float32)
        if not bool(torch.isfinite(piece).all()):
            heading = f"quantised: {key!r} has elements that are not finite"
            fix = "Leave this tensor unquantised, or look for the cause of these elements."
            raise UnsupportedValue(error_text(heading, fix=fix))
        rows, columns = (-size % (side or size) for size, side in zip(shape[-2:], block, strict=True))
        parts = encode(torch.nn.functional.pad(piece, (0, columns, 0, rows)), block)
        place = part.box([low + more for low, more in zip(at.offset, start, strict=True)], shape)
        new[slices(*inside(place, outer.offset))] = parts[number][slices((0,) * len(place.shape), place.shape)].to(
            new.dtype
        )
    return new[slices(*inside(box, outer.offset))]

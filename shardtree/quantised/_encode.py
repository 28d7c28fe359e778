"""Quantising: boxes of a part, of the blocks of the weight that they come from."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..core.geometry import slices
from ..core.lazy import Box
from ..errors import UnsupportedValue, error_text
from ._part import WINDOW, Part, inside, windows

Encode = Callable[[torch.Tensor, tuple[int, int]], tuple[torch.Tensor, ...]]
"""From float32 matrices of whole blocks, (..., rows, columns), and the blocks' size, to the parts of a form."""
Shape = tuple[int, ...]


def blocks_of(part: Part, block: tuple[int, int], whole: Shape, box: Box) -> Box:
    """Return the box of a weight's matrices, of whole blocks, that a box of a part comes from.

    Args:
        part: Part of the form.
        block: Block size of the form; 0 means the whole axis.
        whole: the matrices' shape.
        box: Box of the stored part.
    """
    front = len(whole) - 2
    starts, sizes = [*box.offset[:front]], [*box.shape[:front]]
    for axis, (step, each) in enumerate(zip(part.steps, block, strict=True), front):
        low, high = box.offset[axis] * step, (box.offset[axis] + box.shape[axis]) * step if step else whole[axis]
        starts.append(low // each * each if each else 0)
        sizes.append(min(whole[axis], -(-high // each) * each if each else whole[axis]) - starts[-1])
    return Box(tuple(starts), tuple(sizes))


def encoded(
    key: str, part: Part, number: int, block: tuple[int, int], encode: Encode, data: torch.Tensor, at: Box, box: Box
) -> torch.Tensor:
    """Return a box of a part.

    Args:
        key: Key of the weight, for errors.
        part: Part of the form.
        number: Number of the part.
        block: Block size of the form.
        encode: Encoder of the form.
        data: the weight's elements.
        at: which box of the weight's matrices these are, of whole blocks.
        box: Box of the part.

    Raises:
        UnsupportedValue: an element isn't finite: all others of its block would be lost with it.
    """
    outer = part.box(*at)
    new = torch.empty(outer.shape, dtype=part.dtypes[0], device=data.device)
    # Whole blocks, and as many as a window has room for: along a row, then rows of them.
    high, wide = (each or max(1, size) for each, size in zip(block, at.shape[-2:], strict=True))
    wide *= max(1, min(WINDOW // (high * wide), -(-at.shape[-1] // wide)))
    high *= max(1, WINDOW // (high * wide))
    for start, shape in windows(Box((0,) * len(at.shape), at.shape), high, wide):
        piece = data[slices(start, shape)].to(torch.float32)
        if not bool(torch.isfinite(piece).all()):
            what = f"quantised: elements of {key!r} that aren't finite have no scale"
            raise UnsupportedValue(error_text(what, fix="Leave this tensor as it is, or look for what made them."))
        rows, columns = (-size % (each or size) for size, each in zip(shape[-2:], block, strict=True))
        parts = encode(torch.nn.functional.pad(piece, (0, columns, 0, rows)), block)
        place = part.box([low + more for low, more in zip(at.offset, start, strict=True)], shape)
        new[slices(*inside(place, outer.offset))] = parts[number][slices((0,) * len(place.shape), place.shape)].to(
            new.dtype
        )
    return new[slices(*inside(box, outer.offset))]

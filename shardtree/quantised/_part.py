"""Part: one of a quantised weight's stored tensors, such as its values or its scales.

A part knows which box of the stored tensor a box of the weight needs. In this example, the parts are values and a scale
for each block of 2 x 3, and the box of rows 1 to 2 and columns 3 to 5 of the weight is needed::

    weight (4, 6)             values: per=(1, 1)        scales: per=(2, 3), so (2, 2)
     .  .  .   .  .  .         .  .  .   .  .  .
     .  .  .  [W][W][W]        .  .  .  [v][v][v]        .  [s]
                                                                    W = v * s, s of its block
     .  .  .  [W][W][W]        .  .  .  [v][v][v]        .  [s]
     .  .  .   .  .  .         .  .  .   .  .  .

    box (1:3, 3:6)             needs (1:3, 3:6)          needs (0:2, 1:2): rows // 2, columns // 3

With `pack=(1, 2)`, the values are stored as (4, 3), two in each element. Then the box needs columns 1 to 2 of them, and
the value outside the box is read and dropped.

The last two axes of a weight form matrices. Its stored matrices are these or, in some forms, their transposes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import torch

from ..core.geometry import slices
from ..core.lazy import Box
from ..core.mapping import ShardedTensor
from ..core.trees import join_data
from ..errors import UnsupportedValue, error_text
from ..lenses import StoredForm

WINDOW = 2**19
"""Elements that are computed at a time, so that they stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Part:
    """Description of one of a weight's stored tensors, such as its values or its scales.

    Attributes:
        name: Suffix of the tensor's key. It is appended to the weight's key, or replaces that key's suffix `Form.base`.
        dtypes: Dtypes that the tensor may have; the first one is written.
        read: Function that decodes (and unpacks) stored elements, usually to float32.
        per: Block size along each of the weight's last two axes: elements of the weight that share one element of this
            part. 0 means the whole axis; -n means groups of n elements that may lie anywhere along the axis (GPTQ).
            There is one number for a part that lacks the last axis, and None for a part that has no axis of the weight.
        pack: Number of the part's elements that are packed into one stored element, along the same axes.
        tail: Sizes of further axes of the stored tensor.
        group: Group size if the part stores the group index of each row (GPTQ's `g_idx`); 0 for other parts. n means
            groups of n consecutive rows, whose stored indices are only checked. -n means groups of n rows that may lie
            anywhere.
        count: Number of groups whose rows may lie anywhere; filled in by `of`.
        shape: Shape of the weight's matrices if the part stores it for a check; empty for other parts. Forms have
            placeholders here, such as (0, 0); `of` fills in the actual shape.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    read: Callable[[torch.Tensor], torch.Tensor]
    per: tuple[int, ...] | None = (1, 1)
    pack: tuple[int, int] = (1, 1)
    tail: tuple[int, ...] = ()
    group: int = 0
    count: int = 1
    shape: tuple[int, ...] = ()

    def of(self, whole: Sequence[int]) -> Part:
        """Return the part with `count` and `shape` filled in, for stored matrices of the shape `whole`."""
        if self.shape:
            return replace(self, shape=tuple(whole[-2:]))
        by = min(self.group, *(self.per or (0,)))
        return replace(self, count=-(whole[-2] // by)) if by < 0 else self

    @property
    def steps(self) -> tuple[int, ...]:
        """Number of elements of the weight, along its last two axes, per stored element; 0 means the whole axis."""
        return tuple(max(0, per) * pack for per, pack in zip(self.per or (), self.pack, strict=False))

    def box(self, offset: Sequence[int], shape: Sequence[int]) -> Box:
        """Return the smallest box of the stored tensor that a box of the weight needs, given its offset and shape."""
        if self.per is None:
            return Box((0,) * len(self.tail), self.tail)
        starts, sizes = [*offset[:-2]], [*shape[:-2]]
        for step, low, size in zip(self.steps, offset[-2:], shape[-2:], strict=False):
            starts.append(low // step if step else 0)
            sizes.append(-(-(low + size) // step) - starts[-1] if step else self.count)
        return Box((*starts, *(0,) * len(self.tail)), (*sizes, *self.tail))

    def pieces(self, offset: Sequence[int], shape: Sequence[int]) -> list[tuple[Box, bool]]:
        """Return the stored box that a box of the weight needs, cut into (piece, is owned) pairs.

        Each stored element has one owner among the boxes of the weight, so that it is saved only once. If an edge cuts
        a block, several boxes need the block's stored element, and the first of these boxes is the owner.
        """
        box = self.box(offset, shape)
        if 0 in shape:
            return [(box, 0 in box.shape)]  # another box, at the same place, has the elements
        if self.per is None:
            return [(box, not any(offset))]
        front = len(offset) - 2
        is_first = not any(offset[front + len(self.steps) :])  # along the axis that the part lacks
        axes = [[(low, size, is_first)] for low, size in zip(*box, strict=True)]
        for axis, step in enumerate(self.steps, front):
            low, size, _ = axes[axis][0]
            if offset[axis] % step if step else offset[axis]:
                shared = 1 if step else size
                axes[axis] = [(low, shared, False), *([(low + 1, size - 1, is_first)] if size > shared else [])]
        return [
            (Box(tuple(low for low, _, _ in spans), tuple(size for _, size, _ in spans)), all(own for *_, own in spans))
            for spans in product(*axes)
        ]

    def spread(self, elements: torch.Tensor, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return this part's decoded elements, one for each element of a box of the weight.

        An axis may have size 1 instead, and broadcast, if one stored element serves the whole axis of the box. If the
        part stores predictable numbers (the shape, or the indices of groups of consecutive rows), the result is the
        stored numbers minus the expected ones.

        Args:
            elements: Stored elements in the box `self.box(offset, shape)`.
            offset: Offset of the box of the weight.
            shape: Shape of the box of the weight.
        """
        values = self.read(elements)
        if self.group > 0:
            places = torch.arange(offset[-2], offset[-2] + shape[-2], device=values.device)
            values = values - places // self.group
        if self.shape:
            values = values - torch.tensor(self.shape, device=values.device)
        if len(self.per or ()) == 1:
            values = values.unsqueeze(-1)
        for axis, per, step in zip((-2, -1), self.per or (), self.steps, strict=False):
            if step and values.shape[axis] > 1:
                if per > 1:
                    wide = values.unsqueeze(axis)
                    sizes = [*wide.shape]
                    sizes[axis] = per
                    values = wide.expand(sizes).flatten(axis - 1, axis)
                values = values.narrow(axis, offset[axis] % step, shape[axis])
        return values


def inside(box: Box, base: Sequence[int]) -> Box:
    """Return a box with its offset relative to another offset."""
    return Box(tuple(low - first for low, first in zip(box.offset, base, strict=True)), box.shape)


Join = Callable[..., torch.Tensor]
"""Function from the parts' decoded elements to the weight's, as float32."""


def scaled(values: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
    """Return values multiplied by the product of their scales."""
    scale = scales[0]
    for other in scales[1:]:
        scale = scale * other
    return values * scale


def decoded(
    key: str,
    parts: Sequence[Part],
    join: Join,
    tensors: Sequence[torch.Tensor],
    box: Box,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return a box of a weight's stored matrices, decoded from its values, scales and so on.

    Args:
        key: Key of the weight, for errors.
        parts: Descriptions of the stored tensors.
        join: Function that computes the weight's elements from the decoded elements of all stored tensors.
        tensors: Elements of each stored tensor in the box `part.box(*box)`.
        box: Box of the weight's stored matrices.
        dtype: Dtype of the result.

    Raises:
        UnsupportedValue: a row's stored group index (GPTQ) isn't the one that the parts describe, or the stored shape
            isn't the shape of the values.
    """
    if not all(type(tensor) is torch.Tensor for tensor in tensors):  # traced: one step, whatever its size
        return join(*(part.spread(tensor, *box) for part, tensor in zip(parts, tensors, strict=True))).to(dtype)
    new = torch.empty(box.shape, dtype=dtype, device=tensors[0].device)
    outer = [part.box(*box).offset for part in parts]
    shared = max(part.per[0] for part in parts if part.per)  # rows of one scale are computed together
    high = shared if shared > 1 else max(1, WINDOW // max(1, box.shape[-1]))
    for start, size in windows(box, high, max(2, WINDOW // high // 2 * 2)):  # even, for values that are read in pairs
        place = [low + more for low, more in zip(box.offset, start, strict=True)]
        spread = []
        for part, tensor, base in zip(parts, tensors, outer, strict=True):
            spread.append(part.spread(tensor[slices(*inside(part.box(place, size), base))], place, size))
            if (part.group or part.shape) and not bool(((spread[-1] >= 0) & (spread[-1] < part.count)).all()):
                raise _not_as_said(key, part, tensor, place[-2])
        new[slices(start, size)] = join(*spread)
    return new


def _not_as_said(key: str, part: Part, tensor: torch.Tensor, row: int) -> UnsupportedValue:
    if part.shape:
        heading = f"quantised: the stored shape of {key!r} differs from the shape of its unpacked values"
        found, expected = f"{part.name} {tensor.tolist()}", list(part.shape)
        fix = """The values are padded or of another bit width than the Form assumes; no Form in FORMS supports either.
  Store the weight without padding, as a Form in FORMS describes, with the program that wrote it."""
        return UnsupportedValue(error_text(heading, found=found, expected=expected, fix=fix))
    heading = f"quantised: {part.name} puts rows of {key!r} into other groups than the Form assumes"
    fix = f"""If rows may be in any group (desc_act), choose FORMS['gptq'] or FORMS['gptq_v2'].
  If config.json has another group size than {abs(part.group)}, copy the Form with that size in `block`,
  and in the parts' `per` and `group` wherever they have {abs(part.group)}."""
    return UnsupportedValue(error_text(heading, found=f"an unexpected group index in row {row} or later", fix=fix))


def windows(box: Box, high: int, wide: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a box into windows, each inside one matrix, and yield them as (offset, shape) relative to the box.

    Args:
        box: Box of matrices, which are its last two axes.
        high: Upper bound of a window's rows; cuts are at multiples of it, counted from the whole matrix's first row.
        wide: Upper bound of a window's columns.
    """
    *front, rows, columns = box.shape
    edges = sorted({0, rows, *range(-box.offset[-2] % high, rows, high)})
    for place in product(*map(range, front)):
        for low, end in pairwise(edges):
            for first in range(0, columns, wide):
                yield (*place, low, first), (*(1,) * len(front), end - low, min(wide, columns - first))


# Shards of stored tensors: cut into pieces, each with one owner among the ranks that have it, and joined again.


Pieces = Sequence[tuple[Box, bool]]
"""Boxes of a stored tensor, each with whether this rank owns it: only the owner's copy is the main replica."""


def is_of_blocks(box: Box, whole: Sequence[int], block: Sequence[int]) -> bool:
    """Return whether a box consists of whole blocks of a grid over the last two axes.

    Blocks at the end of an axis may be shorter.

    Args:
        box: Box of matrices.
        whole: Whole shape of the matrices.
        block: Numbers of rows and columns of a block; 0 means the whole axis.

    Examples:
        >>> last, first = Box((128, 0), (72, 6)), Box((0, 0), (64, 6))
        >>> is_of_blocks(last, (200, 6), (128, 0)), is_of_blocks(first, (200, 6), (128, 0))
        (True, False)
    """
    rows = zip(box.offset[-2:], box.shape[-2:], whole[-2:], block, strict=True)
    edges = [(low, low + size, length, side or max(1, length)) for low, size, length, side in rows]
    return all(low % side == 0 and (high == length or high % side == 0) for low, high, length, side in edges)


def shard_of(weight: ShardedTensor, key: str, part: Part, box: Box, whole: Sequence[int], data: Any) -> ShardedTensor:
    """Return the shard of a stored tensor, derived from the weight's shard.

    Args:
        weight: Shard of the weight.
        key: Key of the stored tensor.
        part: Description of the stored tensor.
        box: Box of the stored tensor.
        whole: Shape of the whole weight, oriented as stored.
        data: Elements of the box, or None.
    """
    front = 0 if part.per is None else weight.prepend_axis_num
    return replace(
        weight,
        key=key,
        data=data,
        dtype=part.dtypes[0] if data is None else data.dtype,
        local_shape=box.shape[front:],
        global_shape=part.box((0,) * len(whole), whole).shape,
        global_offset=box.offset,
        axis_fragmentations=None,
        prepend_axis_num=front,
        flattened_range=None,
    )


def owned(shard: ShardedTensor, is_own: bool) -> ShardedTensor:
    """Return a shard unchanged if this rank owns it, else with a replica id that isn't the main one."""
    if is_own:
        return shard
    replica = shard.replica_id
    return replace(shard, replica_id=replica + 1 if isinstance(replica, int) else (*replica[:-1], replica[-1] + 1))


def in_pieces(shard: ShardedTensor, pieces: Pieces) -> StoredForm:
    """Return a stored tensor's shard cut into pieces; only pieces that this rank owns can be main replicas."""
    front, shards = shard.prepend_axis_num, []
    for box, is_own in pieces:
        inside = [low - base for low, base in zip(box.offset, shard.global_offset, strict=True)][front:]
        data = None if shard.data is None else shard.data[slices(tuple(inside), box.shape[front:])]
        piece = replace(shard, data=data, local_shape=box.shape[front:], global_offset=box.offset)
        shards.append(owned(piece, is_own))
    return StoredForm(tuple(shards), lambda parts: joined(pieces, parts))


def joined(pieces: Pieces, tensors: Sequence[Any]) -> Any:
    """Return the tensors of pieces joined into the box that they tile; lazy if they are lazy.

    Examples:
        >>> joined([(Box((0, 0), (1, 1)), False), (Box((0, 1), (1, 2)), True)], [torch.zeros(1, 1), torch.ones(1, 2)])
        tensor([[0., 1., 1.]])
    """
    items = [(box.offset, tensor) for (box, _), tensor in zip(pieces, tensors, strict=True)]
    axes = len(items[0][0])
    for axis in reversed(range(axes)):
        rows = defaultdict[tuple[int, ...], list[Any]](list)
        for offset, tensor in items:
            rows[offset[:axis]].append(tensor)
        # Axes are counted from the end: a rank's tensors have no prepended axes.
        items = [
            (place, parts[0] if len(parts) == 1 else join_data(torch.cat, parts, axis - axes))
            for place, parts in rows.items()
        ]
    return items[0][1]

"""Lenses that permute, split and merge axes, by axis numbers or by patterns like those of einops."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from ..core.geometry import integers, refuse
from ..core.mapping import ShardedTensor
from ..errors import MetadataError, ShapeError, error_text
from ._lens import Lens, StoredForm, check_box, check_exact, positive
from ._traced import stored_by

# Axes in another order.


def transposed(*axes: int) -> Lens:
    """Return the lens that permutes a tensor's axes as `torch.permute` does; stored boxes are always views.

    Args:
        axes: All axes of the model's tensor in their stored order, not counting prepended axes; by default the last two
            are swapped.

    Raises:
        MetadataError: An axis isn't an integer.
        ShapeError: The tensor's axes are not each given once.

    Examples:
        >>> import torch
        >>> built = transposed()(ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 2)))
        >>> built.shards[0].global_shape, built.shards[0].global_offset
        ((3, 4), (0, 2))
    """
    axes = integers("transposed", "axes", axes)

    def lens(shard: ShardedTensor) -> StoredForm:
        check_box("transposed", shard)
        order = _order(shard, axes)
        back = tuple(order.index(axis) for axis in range(len(order)))
        front = shard.prepend_axis_num

        def permute(values: tuple[int, ...]) -> tuple[int, ...]:
            return (*values[:front], *(values[front + axis] for axis in order))

        part = replace(
            shard,
            data=None if shard.data is None else shard.data.permute(order),
            local_shape=tuple(shard.local_shape[axis] for axis in order),
            global_shape=permute(shard.global_shape),
            global_offset=permute(shard.global_offset),
            axis_fragmentations=None if shard.axis_fragmentations is None else permute(shard.axis_fragmentations),
        )
        return StoredForm((part,), lambda parts: parts[0].permute(back))

    return lens


def _order(shard: ShardedTensor, axes: Sequence[int]) -> tuple[int, ...]:
    count = len(shard.local_shape)
    if not axes and count >= 2:
        return (*range(count - 2), count - 1, count - 2)
    order = tuple(axis + count if -count <= axis < 0 else axis for axis in axes)
    if sorted(order) != list(range(count)) or not axes:
        found, expected = f"axes {tuple(axes)}", f"each of the {count} axes of {shard.local_shape} once"
        heading = f"transposed: the axes are not a permutation of the axes of {shard.key!r}"
        raise ShapeError(error_text(heading, found=found, expected=expected))
    return order


Groups = tuple[tuple[str, ...], ...]  # the names of each axis
_AXIS = re.compile(r"\(([^()]*)\)|([^\s()]+)")


def rearranged(pattern: str, **sizes: int) -> Lens:
    """Return the lens that rearranges axes by a pattern: the model's axes on the left, the stored ones on the right.

    A name is an axis; names in parentheses are axes merged into one, row-major. Both sides have the same names. If the
    pattern also names the shard's prepended axes (`prepend_axis_num`), they become ordinary axes of the tensor;
    otherwise they stay in front.

    A box that cuts through merged axes may become several stored boxes. Axes merged on the left give few. Axes merged
    on the right may give many: if a box holds only a part of axis b and all of c, then ``(a b c)`` gives up to one box
    for each index of a. Data are views where torch can make them.

    Args:
        pattern: Pattern such as ``"(e f) h -> e h f"``.
        sizes: Sizes of the names in parentheses on the left. One in each pair of parentheses may be left out: it
            follows from the length of the axis.

    Raises:
        MetadataError: The pattern is malformed, or a size doesn't belong to it.
        ShapeError: The tensor doesn't fit the pattern.

    Examples:
        >>> import torch
        >>> lens = rearranged("(e f) h -> e h f", e=4)  # the experts' rows one below the other
        >>> shard = ShardedTensor.from_rank_offsets("experts.fc2", torch.zeros(6, 5), (0, 1, 2))
        >>> [(part.global_shape, part.global_offset, part.local_shape) for part in lens(shard).shards]
        [((4, 5, 3), (2, 0, 0), (2, 5, 3))]

    References:
        A. Rogozhnikov, Einops: clear and reliable tensor manipulations with Einstein-like notation, ICLR 2022.
    """
    left, right = _sides(pattern)
    doing, sizes = f"rearranged {pattern!r}", _checked_sizes(pattern, left, sizes)

    def lens(shard: ShardedTensor) -> StoredForm:
        check_exact(doing, shard)
        # Prepended axes that the pattern doesn't name stay in front, so that a layer's lens serves stacked layers too.
        front = 0 if len(left) == len(shard.global_shape) else shard.prepend_axis_num
        shape = shard.global_shape[front:]
        if len(left) != len(shape):
            found, expected = f"{len(shape)} axes, of shape {shape}", f"{len(left)} axes, as left of the arrow"
            heading = f"{doing}: the pattern does not fit the axes of {shard.key!r}"
            raise ShapeError(error_text(heading, found=found, expected=expected))
        full = _all_sizes(pattern, shard, left, shape, sizes)
        return stored_by(_Rearrangement(left, right, tuple(full.items())), doing, shard, front, keep_views=True)

    return lens


def _sides(pattern: str) -> tuple[Groups, Groups]:
    sides = [_groups(side) for side in pattern.split("->")] if isinstance(pattern, str) else []
    names = [[name for group in side for name in group] for side in sides]
    flat = names[0] if names else []
    is_sound = len(sides) == 2 and all(flat) and all(map(all, sides))
    if not (is_sound and all(name.isidentifier() for name in flat) and len(set(flat)) == len(flat)):
        _refuse_pattern(pattern)
    if sorted(names[0]) != sorted(names[1]):
        _refuse_pattern(pattern)
    return sides[0], sides[1]


def _groups(side: str) -> Groups:
    if _AXIS.sub("", side).strip():
        return ((),)
    return tuple(tuple(single.split()) if single else tuple(many.split()) for many, single in _AXIS.findall(side))


def _refuse_pattern(pattern: object) -> None:
    fix = "Write as in 'a (b c) -> (a b) c': each name once on either side, none of the parentheses empty."
    refuse("rearranged", "pattern", repr(pattern)[:200], "axes -> axes", fix, error=MetadataError)


def _checked_sizes(pattern: str, left: Groups, sizes: Mapping[str, int]) -> dict[str, int]:
    doing = f"rearranged {pattern!r}"
    unknown = sorted(sizes.keys() - {name for group in left for name in group})
    if unknown:
        refuse(doing, "sizes", ", ".join(unknown), "names in the pattern", "Correct them.", error=MetadataError)
    for group in left:
        lacking = [name for name in group if name not in sizes]
        if len(lacking) > 1:
            fix = f"Pass all but one: {', '.join(f'{name}=...' for name in lacking[1:])}."
            refuse(doing, "sizes", f"none for {', '.join(lacking)}", "one per axis at most", fix, error=MetadataError)
    return {name: positive(doing, name, size) for name, size in sizes.items()}


def _all_sizes(
    pattern: str, shard: ShardedTensor, left: Groups, shape: Sequence[int], sizes: Mapping[str, int]
) -> dict[str, int]:
    """Return the size of each name in a pattern; sizes that the caller left out follow from the tensor's shape.

    Args:
        pattern: Pattern for errors.
        shard: Box of the tensor, for errors.
        left: Names of each axis on the pattern's left.
        shape: Length of each of these axes in the whole tensor.
        sizes: Sizes that the caller has passed.

    Raises:
        ShapeError: Axes do not fit the sizes; the error lists all of them.
    """
    full, wrong = dict(sizes), []
    for axis, (group, length) in enumerate(zip(left, shape, strict=True)):
        product = prod(sizes.get(name, 1) for name in group)
        lacking = [name for name in group if name not in sizes]
        if length % product or (not lacking and length != product):
            texts = " * ".join(f"{name}={sizes[name]}" for name in group if name in sizes)
            wrong.append(f"axis {axis} is {length}, not {'a multiple of ' if lacking else ''}{texts}")
        full |= dict.fromkeys(lacking, length // product)
    if wrong:
        heading = f"rearranged {pattern!r}: the sizes do not fit the axes of {shard.key!r}"
        raise ShapeError(error_text(heading, found=f"global shape {shard.global_shape}", offenders=wrong))
    return full


@dataclass(frozen=True, slots=True)
class _Rearrangement:
    """Function that rearranges a whole tensor by a pattern; equal patterns compare equal, so that each is traced once.

    Attributes:
        left: For each axis of the argument, the names that the pattern merges in it.
        right: For each axis of the result, the names that the pattern merges in it.
        sizes: Pairs of a name and its size.
    """

    left: Groups
    right: Groups
    sizes: tuple[tuple[str, int], ...]

    def __call__(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        sizes = dict(self.sizes)
        before, after = ([name for group in side for name in group] for side in (self.left, self.right))
        apart = tensor.reshape([sizes[name] for name in before]).permute([before.index(name) for name in after])
        return {"": apart.reshape([prod(sizes[name] for name in group) for group in self.right])}

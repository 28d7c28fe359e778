"""Lenses that split, reorder and merge axes, written as patterns like einops'."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch

from ..errors import MetadataError, ShapeError, error_text
from ..geometry import flat_boxes, integers, refuse
from ..mapping import ShardedTensor
from ..trees import join_data
from ._lens import (
    Lens,
    Shape,
    StoredForm,
    check_box,
    check_exact,
    compose,
    flat_axes,
    no_elements,
    positive,
    reshaped,
    with_values,
)

# One axis stored as several, row-major, or several as one: parentheses in einops.


def unfolded(at: int, sizes: Shape) -> Lens:
    """Return the lens that stores an axis as several of these sizes; their product is its length.

    An interval of the axis becomes a few boxes, as a flat range does; always views.

    Args:
        at: the axis, counted from the front, without prepended ones.
        sizes: the new axes'.

    Examples:
        >>> built = unfolded(0, (2, 3))(ShardedTensor.from_rank_offsets("w", torch.arange(3), (0, 1, 2)))
        >>> [(shard.local_shape, shard.global_offset) for shard in built.shards]
        [((1, 3), (1, 0))]
    """

    def lens(shard: ShardedTensor) -> StoredForm:
        begin = shard.global_offset[at + shard.prepend_axis_num]
        boxes = _interval_boxes(sizes, begin, begin + shard.local_shape[at])
        parts = tuple(_unfolded(shard, at, sizes, *box) for box in boxes)
        return StoredForm(parts, lambda merged: _merge_axes(shard, at, len(sizes), merged, shard.local_shape))

    return lens


def _interval_boxes(sizes: Shape, begin: int, end: int) -> list[tuple[Shape, Shape, int]]:
    """Return offset, shape and first place of each box that an interval of a folded axis consists of."""
    if not prod(sizes):
        return [((0,) * len(sizes), sizes, 0)]  # an empty tensor must be stored too
    columns = flat_boxes(*map(np.array, ([sizes], [begin], [end])))
    rows = zip(*(column.tolist() for column in columns[1:]), strict=True)
    return [(tuple(offset), tuple(shape), position) for offset, shape, position in rows]


def _unfolded(shard: ShardedTensor, at: int, sizes: Shape, offset: Shape, shape: Shape, position: int) -> ShardedTensor:
    place, local = at + shard.prepend_axis_num, with_values(shard.local_shape, at, shape)
    part = None if shard.data is None else shard.data.narrow(at, position, prod(shape)).reshape(local)
    return replace(
        shard,
        data=part,
        local_shape=local,
        global_shape=with_values(shard.global_shape, place, sizes),
        global_offset=with_values(shard.global_offset, place, offset),
        axis_fragmentations=None,
    )


def folded(at: int, count: int) -> Lens:
    """Return the lens that stores several adjacent axes as one.

    A box becomes one box for each index along the leading axes, up to the last axis of which it lacks a part.

    Args:
        at: the first of the axes, counted from the front, without prepended ones.
        count: how many there are.

    Examples:
        >>> shard = ShardedTensor("w", torch.zeros(2, 1), torch.float32, (2, 1), (2, 3), (0, 1), None)
        >>> [(part.local_shape, part.global_offset) for part in folded(0, 2)(shard).shards]
        [((1,), (1,)), ((1,), (4,))]
    """

    def lens(shard: ShardedTensor) -> StoredForm:
        place = at + shard.prepend_axis_num
        sizes, box = shard.global_shape[place : place + count], shard.local_shape[at : at + count]
        single = _single_axes(sizes, box)
        # A rank without elements stores nothing, unless the whole tensor has none.
        holds_any = bool(prod(box)) or not prod(sizes)
        indices = product(*map(range, box[:single])) if holds_any else ()
        parts = tuple(_folded(shard, at, sizes, index) for index in indices)
        return StoredForm(parts, lambda merged: _merge_axes(shard, at, 1, merged, shard.local_shape))

    return lens


def _single_axes(sizes: Shape, box: Shape) -> int:
    """Return along how many leading axes a box is split; for fixed indices there, the rest is one interval."""
    if not prod(sizes):
        return 0
    return next((axis for axis in reversed(range(len(sizes))) if box[axis] != sizes[axis]), 0)


def _folded(shard: ShardedTensor, at: int, sizes: Shape, index: Shape) -> ShardedTensor:
    place, count = at + shard.prepend_axis_num, len(sizes)
    offset = shard.global_offset[place : place + count]
    first = (*(base + number for base, number in zip(offset, index, strict=False)), *offset[len(index) :])
    length = prod(shard.local_shape[at + len(index) : at + count])
    local = with_values(shard.local_shape, at, (length,), count)
    data = shard.data
    for axis, number in enumerate(index if data is not None else ()):
        data = data.narrow(at + axis, number, 1)
    return replace(
        shard,
        data=None if data is None else flat_axes(data, at, count),
        local_shape=local,
        global_shape=with_values(shard.global_shape, place, (prod(sizes),), count),
        global_offset=with_values(shard.global_offset, place, (_row_major(first, sizes),), count),
        axis_fragmentations=None,
    )


def _row_major(index: Shape, sizes: Shape) -> int:
    number = 0
    for place, size in zip(index, sizes, strict=True):
        number = number * size + place
    return number if prod(sizes) else 0


def _merge_axes(shard: ShardedTensor, at: int, count: int, parts: Sequence[Any], shape: Shape) -> Any:
    """Return pieces concatenated along an axis, of which they have several, and reshaped to the box."""
    if not parts:
        return no_elements(shard, shape)
    rows = [flat_axes(part, at, count) for part in parts]
    return reshaped(rows[0] if len(rows) == 1 else join_data(torch.cat, rows, at), shape)


# Axes in another order.


def transposed(*axes: int) -> Lens:
    """Return the lens that stores a tensor with its axes in this order, as `torch.permute` gives it; always views.

    Args:
        axes: all axes of the tensor that the model holds, prepended ones not counted; by default the last two change
            places.

    Raises:
        MetadataError: they aren't integers.
        ShapeError: they aren't the tensor's axes.

    Examples:
        >>> import torch
        >>> built = transposed()(ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 2)))
        >>> built.shards[0].global_shape, built.shards[0].global_offset
        ((3, 4), (0, 2))
    """
    given = integers("transposed", "axes", axes)

    def lens(shard: ShardedTensor) -> StoredForm:
        check_box("transposed", shard)
        order = _order(shard, given)
        back = [order.index(axis) for axis in range(len(order))]
        front = shard.prepend_axis_num

        def moved(values: tuple[int, ...]) -> tuple[int, ...]:
            return (*values[:front], *(values[front + axis] for axis in order))

        stored = replace(
            shard,
            data=None if shard.data is None else shard.data.permute(order),
            local_shape=tuple(shard.local_shape[axis] for axis in order),
            global_shape=moved(shard.global_shape),
            global_offset=moved(shard.global_offset),
            axis_fragmentations=None if shard.axis_fragmentations is None else moved(shard.axis_fragmentations),
        )
        return StoredForm((stored,), lambda parts: _back(parts[0], back))

    return lens


def _back(tensor: Any, order: Sequence[int]) -> Any:
    return tensor.permute(tuple(order))


def _order(shard: ShardedTensor, axes: Sequence[int]) -> tuple[int, ...]:
    count = len(shard.local_shape)
    if not axes and count >= 2:
        return (*range(count - 2), count - 1, count - 2)
    order = tuple(axis + count if -count <= axis < 0 else axis for axis in axes)
    if sorted(order) != list(range(count)) or not axes:
        found, expected = f"axes {tuple(axes)}", f"each of the {count} axes of {shard.local_shape} once"
        raise ShapeError(error_text(f"transposed: {shard.key!r} has no such axes", found=found, expected=expected))
    return order


Groups = tuple[tuple[str, ...], ...]  # the names of each axis
_AXIS = re.compile(r"\(([^()]*)\)|([^\s()]+)")


def rearranged(pattern: str, **sizes: int) -> Lens:
    """Return the lens that rearranges axes as a pattern says: on the left what the model holds, then what is stored.

    A name is an axis; names in parentheses are axes merged into one, row-major. The names on both sides are the
    same. A pattern that names the prepended axes too makes them axes of the tensor; else they stay in front.

    A box that cuts through an axis in parentheses becomes several boxes: a few on the left, and on the right one for
    each index of the names before the last one that it hasn't all of. Data are views where torch can make them.

    Args:
        pattern: as ``"(e f) h -> e h f"``.
        sizes: of the names in parentheses on the left; one in each may be left out, and follows from the axis.

    Raises:
        MetadataError: it isn't such a pattern, or the sizes don't belong to it.
        ShapeError: the tensor doesn't fit the pattern.

    Examples:
        >>> import torch
        >>> lens = rearranged("(e f) h -> e h f", e=4)  # the experts' rows one below the other
        >>> shard = ShardedTensor.from_rank_offsets("experts.fc2", torch.zeros(6, 5), (0, 1, 2))
        >>> [(part.global_shape, part.global_offset, part.local_shape) for part in lens(shard).shards]
        [((4, 5, 3), (2, 0, 0), (2, 5, 3))]

    References:
        A. Rogozhnikov, Einops: clear and reliable tensor manipulations with Einstein-like notation, ICLR 2022.
    """
    held, stored = _parsed(pattern)
    known = _checked_sizes(pattern, held, sizes)

    def lens(shard: ShardedTensor) -> StoredForm:
        check_exact(f"rearranged {pattern!r}", shard)
        # Prepended axes stay in front where the pattern doesn't name them: one layer's lens is that of stacked layers
        # too.
        front = 0 if len(held) == len(shard.global_shape) else shard.prepend_axis_num
        shape = shard.global_shape[front:]
        if len(held) != len(shape):
            found, expected = f"{len(shape)} axes, {shape}", f"{len(held)} axes"
            what = f"rearranged {pattern!r}: {shard.key!r} doesn't fit"
            raise ShapeError(error_text(what, found=found, expected=expected))
        full = _all_sizes(pattern, shard, held, shape, known)
        own = [] if front == shard.prepend_axis_num else [_own_axes]
        return compose(*own, *_steps(held, stored, full))(shard)

    return lens


def _parsed(pattern: str) -> tuple[Groups, Groups]:
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


def _checked_sizes(pattern: str, held: Groups, sizes: Mapping[str, int]) -> dict[str, int]:
    doing = f"rearranged {pattern!r}"
    unknown = sorted(sizes.keys() - {name for group in held for name in group})
    if unknown:
        refuse(doing, "sizes", ", ".join(unknown), "names in the pattern", "Correct them.", error=MetadataError)
    for group in held:
        lacking = [name for name in group if name not in sizes]
        if len(lacking) > 1:
            fix = f"Pass all but one: {', '.join(f'{name}=...' for name in lacking[1:])}."
            refuse(doing, "sizes", f"none for {', '.join(lacking)}", "one unknown an axis", fix, error=MetadataError)
    return {name: positive(doing, name, size) for name, size in sizes.items()}


def _all_sizes(
    pattern: str, shard: ShardedTensor, held: Groups, shape: Sequence[int], known: Mapping[str, int]
) -> dict[str, int]:
    """Return the size of each name, or raise for all axes that don't fit."""
    full, wrong = dict(known), []
    for axis, (group, length) in enumerate(zip(held, shape, strict=True)):
        given = prod(known.get(name, 1) for name in group)
        lacking = [name for name in group if name not in known]
        if length % given or (not lacking and length != given):
            texts = " * ".join(f"{name}={known[name]}" for name in group if name in known)
            wrong.append(f"axis {axis} is {length}, not {'a multiple of ' if lacking else ''}{texts}")
        full |= dict.fromkeys(lacking, length // given)
    if wrong:
        what = f"rearranged {pattern!r}: {shard.key!r} doesn't fit"
        raise ShapeError(error_text(what, found=f"global shape {shard.global_shape}", offenders=wrong))
    return full


def _steps(held: Groups, stored: Groups, sizes: Mapping[str, int]) -> Iterator[Lens]:
    """Yield the lenses, from the last axis to the first, so that the numbers of axes still to come don't change."""
    for axis in reversed(range(len(held))):
        if len(held[axis]) > 1:
            yield unfolded(axis, tuple(sizes[name] for name in held[axis]))
    before, after = ([name for group in side for name in group] for side in (held, stored))
    if before != after:
        yield transposed(*(before.index(name) for name in after))
    for axis in reversed(range(len(stored))):
        if len(stored[axis]) > 1:
            yield folded(sum(map(len, stored[:axis])), len(stored[axis]))


def _own_axes(shard: ShardedTensor) -> StoredForm:
    """Return a box with its prepended axes as axes of its tensor."""
    local = (1,) * shard.prepend_axis_num + shard.local_shape
    data = None if shard.data is None else reshaped(shard.data, local)
    own = replace(shard, data=data, local_shape=local, prepend_axis_num=0)

    def merge(parts: Sequence[Any]) -> Any:
        return reshaped(parts[0], shard.local_shape)

    return StoredForm((own,), merge)

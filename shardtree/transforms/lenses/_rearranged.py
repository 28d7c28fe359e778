"""A lens written as a pattern, as einops writes it: axes taken apart, put in another order, and put together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ...errors import MetadataError, ShapeError, error_text
from ...geometry import refuse
from ...mapping import ShardedTensor
from ._boxes import check_exact, positive, reshaped
from ._folded import folded, unfolded
from ._lens import Built, Lens, compose_factories
from ._transposed import transposed

Groups = tuple[tuple[str, ...], ...]  # the names of each axis
_AXIS = re.compile(r"\(([^()]*)\)|([^\s()]+)")


def rearranged(pattern: str, **sizes: int) -> Lens:
    """Return the lens that rearranges axes as a pattern says: on the left what the model holds, then what is stored.

    A name stands for an axis; names in parentheses for axes that lie in one, row-major. The names on both sides are the
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

    def lens(shard: ShardedTensor) -> Built:
        check_exact(f"rearranged {pattern!r}", shard)
        front = 0 if len(held) == len(shard.global_shape) else shard.prepend_axis_num
        shape = shard.global_shape[front:]
        if len(held) != len(shape):
            found, expected = f"{len(shape)} axes, {shape}", f"{len(held)} axes"
            what = f"rearranged {pattern!r}: {shard.key!r} doesn't fit"
            raise ShapeError(error_text(what, found=found, expected=expected))
        full = _all_sizes(pattern, shard, held, shape, known)
        own = [] if front == shard.prepend_axis_num else [_own_axes]
        return compose_factories(*own, *_steps(held, stored, full))(shard)

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
    """Yield the lenses, from the last axis to the first so that the numbers of those before it stay."""
    for axis in reversed(range(len(held))):
        if len(held[axis]) > 1:
            yield unfolded(axis, tuple(sizes[name] for name in held[axis]))
    before, after = ([name for group in side for name in group] for side in (held, stored))
    if before != after:
        yield transposed(*(before.index(name) for name in after))
    for axis in reversed(range(len(stored))):
        if len(stored[axis]) > 1:
            yield folded(sum(map(len, stored[:axis])), len(stored[axis]))


def _own_axes(shard: ShardedTensor) -> Built:
    """Return a box with its prepended axes as axes of its tensor."""
    local = (1,) * shard.prepend_axis_num + shard.local_shape
    data = None if shard.data is None else reshaped(shard.data, local)
    own = replace(shard, data=data, local_shape=local, prepend_axis_num=0)

    def merge(parts: Sequence[Any]) -> Any:
        return reshaped(parts[0], shard.local_shape)

    return Built((own,), merge)

"""Lens: a pure function from a box that a model holds to the boxes that are stored, with the way back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import prod
from typing import Any, TypeAlias, TypeVar

import torch

from ..core.geometry import integer, refuse
from ..core.lazy import as_integers
from ..core.mapping import ShardedTensor
from ..core.trees import empty_data
from ..errors import MetadataError, ShapeError, UnsupportedValue, error_text


@dataclass(frozen=True, slots=True, eq=False)
class StoredForm:
    """What a lens returns for one box.

    Attributes:
        shards: what is stored, boxes; their data are views of the given data where they can be, None where it is None.
        merge: takes tensors of exactly these boxes, in order, and returns the tensor of the given box.
    """

    shards: tuple[ShardedTensor, ...]
    merge: Callable[[Sequence[Any]], Any]


# One function that returns the way back along with what is stored, as `jax.vjp` does: the way back may use what was
# found on the way there. Megatron-Core's factories are two functions, of which the second has to guess what the first
# was given.
Lens: TypeAlias = Callable[[ShardedTensor], StoredForm]
"""A function from a box of a tensor, as the model holds it, to what is stored of it.

Where an element is stored may depend on the tensor's global shape and the lens's own parameters, never on how the
tensor is cut. So boxes, flat ranges, optimizer states and other numbers of ranks all meet in the same stored tensors.
The given shard is a box; it may lack prepended axes, which axis numbers don't count.

References:
    J. N. Foster et al., Combinators for bidirectional tree transformations, TOPLAS 29(3), 2007; `jax.vjp` for the form.
"""


def compose(*lenses: Lens) -> Lens:
    """Return the lens that goes through all of these: the first sees what the model holds, the last what is stored.

    Without any, it is the lens that changes nothing.

    Raises:
        MetadataError: one of them isn't a function.

    Examples:
        >>> import torch
        >>> from shardtree.lenses import transposed
        >>> twice = compose(transposed(), transposed())
        >>> built = twice(ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 2)))
        >>> built.shards[0].global_offset
        (2, 0)
        >>> built.merge([torch.ones(2, 3)]).shape
        torch.Size([2, 3])
    """
    for number, lens in enumerate(lenses):
        check_function("compose", f"lenses[{number}]", lens)
    return lambda shard: _apply_in_order(lenses, shard)


def check_function(doing: str, field: str, lens: object) -> None:
    """Raise unless a lens is a function.

    Raises:
        MetadataError: it isn't.
    """
    if not callable(lens):
        fix = "Pass what `gate_and_up(...)`, `transposed()` or another such function returns."
        refuse(doing, field, type(lens).__name__, "a lens", fix, error=MetadataError)


def built_by(lens: Lens, shard: ShardedTensor) -> StoredForm:
    """Return what a lens returns for a box, after checking its type: users write lenses too.

    Raises:
        MetadataError: it gives something else.
    """
    form = lens(shard)
    if not isinstance(form, StoredForm):
        fix = "Let the lens return StoredForm(shards, merge)."
        refuse(f"the lens of {shard.key!r}", "result", type(form).__name__, "a StoredForm", fix, error=MetadataError)
    return form


def _apply_in_order(lenses: Sequence[Lens], shard: ShardedTensor) -> StoredForm:
    if not lenses:
        return StoredForm((shard,), lambda parts: parts[0])
    # Each box of the first lens goes through the rest by itself, so no lens needs to know about several boxes.
    first = built_by(lenses[0], shard)
    rest = [_apply_in_order(lenses[1:], part) for part in first.shards]

    def merge(parts: Sequence[Any]) -> Any:
        left = iter(parts)
        return first.merge([each.merge(list(islice(left, len(each.shards)))) for each in rest])

    return StoredForm(tuple(chain.from_iterable(each.shards for each in rest)), merge)


# Checks and reshapes that lenses share.

Shape = tuple[int, ...]
T = TypeVar("T")
DESCRIBE = "Describe what the model holds with `ShardedTensor.from_rank_offsets`, say."


def check_box(doing: str, shard: ShardedTensor) -> None:
    """Raise unless a shard is a box.

    Raises:
        MetadataError: it isn't a ShardedTensor.
        ShapeError: it is a flat range.
    """
    if not isinstance(shard, ShardedTensor):
        refuse(doing, "shard", type(shard).__name__, "a ShardedTensor", DESCRIBE, error=MetadataError)
    if shard.flattened_range is not None:
        found, fix = f"the flat range {shard.flattened_range}", "Use `as_factory`, which takes flat ranges apart."
        raise ShapeError(error_text(f"{doing}: {shard.key!r} isn't a box", found=found, expected="a box", fix=fix))


def check_exact(doing: str, shard: ShardedTensor) -> None:
    """Raise unless a shard is a box of a tensor whose stored shape is known, since places follow from the shape.

    Raises:
        ShapeError: it is a flat range, or its `allow_shape_mismatch` is set.
    """
    check_box(doing, shard)
    if shard.allow_shape_mismatch:
        what = f"{doing}: where {shard.key!r} is stored follows from its global shape"
        fix = "Leave out allow_shape_mismatch. For a padded axis there is `padded_axis`."
        raise ShapeError(error_text(what, found="allow_shape_mismatch=True", expected="the exact shape", fix=fix))


def checked_axis(doing: str, shard: ShardedTensor, axis: int) -> int:
    """Return an axis of the shard's own tensor, counted from the front.

    Raises:
        MetadataError: it isn't an integer.
        ShapeError: there is no such axis.
    """
    axes, number = len(shard.local_shape), integer(doing, "axis", axis)
    if not -axes <= number < axes:
        found, expected = f"axis {number}", f"one of {axes} axes"
        raise ShapeError(error_text(f"{doing}: {shard.key!r} has no such axis", found=found, expected=expected))
    # Prepended axes aren't counted: the lens of one layer is that of stacked layers too.
    return number % axes


def positive(doing: str, field: str, value: int) -> int:
    """Return a count, which is at least 1.

    Raises:
        MetadataError: it isn't an integer, or is less than 1.
    """
    number = integer(doing, field, value)
    if number < 1:
        refuse(doing, field, number, "1 or more", "Count them in what all ranks hold together.", error=MetadataError)
    return number


def with_values(values: tuple[T, ...], at: int, new: tuple[T, ...], count: int = 1) -> tuple[T, ...]:
    """Return a tuple with some values, from a place on, replaced by others.

    Examples:
        >>> with_values((2, 3, 4), 1, (5, 6))
        (2, 5, 6, 4)
    """
    return (*values[:at], *new, *values[at + count :])


def reshaped(tensor: Any, shape: Shape) -> Any:
    """Return a tensor with another shape: a view where it can be, else a copy, bit for bit, of any dtype."""
    if not isinstance(tensor, torch.Tensor):
        return tensor.reshape(shape)
    return as_integers(tensor).reshape(shape).view(tensor.dtype)


def flat_axes(tensor: Any, at: int, count: int) -> Any:
    """Return a tensor with some adjacent axes merged to one, row-major.

    Where a lazy tensor's axes can't be merged, as after a transposition, its rows are concatenated.
    """
    shape = tuple(tensor.shape)
    flat = with_values(shape, at, (prod(shape[at : at + count]),), count)
    try:
        return reshaped(tensor, flat)
    except UnsupportedValue:
        rows = [flat_axes(tensor.select(at, number), at, count - 1) for number in range(shape[at])]
        return torch.cat(rows, dim=at)


def no_elements(shard: ShardedTensor, shape: Shape) -> torch.Tensor:
    """Return a tensor without elements, of the shard's dtype and device."""
    return empty_data(shape, shard.dtype, device_of(shard.data))


def device_of(data: Any) -> torch.device:
    """Return where a shard's tensor is; the CPU where there is none, or none in memory, as in targets of a load."""
    device = getattr(data, "device", None)
    return device if isinstance(device, torch.device) and device.type != "meta" else torch.device("cpu")


# Mappings from patterns of keys to lenses.


def checked_lenses(doing: str, lenses: Mapping[str, Lens | None]) -> dict[str, Lens | None]:
    """Return a copy of a mapping from patterns to lenses, None where a tensor stays as it is.

    Raises:
        MetadataError: it isn't one.

    Examples:
        >>> checked_lenses("by_pattern", {"**.v_proj.**": None})
        {'**.v_proj.**': None}
    """
    if not isinstance(lenses, Mapping) or not all(isinstance(pattern, str) for pattern in lenses):
        fix = "Pass a lens for each pattern of keys."
        refuse(doing, "lenses", type(lenses).__name__, "patterns and lenses", fix, error=MetadataError)
    for pattern, lens in lenses.items():
        if lens is not None:
            check_function(doing, f"lenses[{pattern!r}]", lens)
    return dict(lenses)

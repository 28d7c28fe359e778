"""The type of lenses: pure functions from a box of a model's tensor to its stored boxes and their merge function."""

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
    """Result of a lens for one box of the model: the stored boxes, and the function that merges their tensors.

    Attributes:
        shards: Stored boxes. Their data are views of the box's data where possible, and None if the box has no data.
        merge: Function from tensors of the stored boxes, in order, to the tensor of the model's box.
    """

    shards: tuple[ShardedTensor, ...]
    merge: Callable[[Sequence[Any]], Any]


# One function returns the stored boxes along with the way back, as `jax.vjp` does, so that the way back may use results
# of the way there. Megatron-Core's factories are two functions, and the second has to guess the first one's arguments.
Lens: TypeAlias = Callable[[ShardedTensor], StoredForm]
"""A function from a box of the model's tensor to its stored form.

The index of a stored element may depend on the tensor's global shape and the lens's parameters, never on the layout.
So boxes, flat ranges, optimizer states and any number of ranks lead to the same stored tensors. The shard is a box.
Axis numbers don't count its prepended axes, which its data needn't have.

References:
    J. N. Foster et al., Combinators for bidirectional tree transformations, TOPLAS 29(3), 2007; `jax.vjp` for the form.
"""


def compose(*lenses: Lens) -> Lens:
    """Return the composition of lenses: the first one takes the model's box, the last one gives the stored boxes.

    Without arguments, the result is the identity.

    Raises:
        MetadataError: An argument isn't a function.

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
    """Raise MetadataError unless a lens is a function."""
    if not callable(lens):
        fix = "Pass a lens, such as `gate_and_up(...)` or `transposed()`."
        refuse(doing, field, type(lens).__name__, "a lens", fix, error=MetadataError)


def built_by(lens: Lens, shard: ShardedTensor) -> StoredForm:
    """Return a lens's stored form of a box, after checking its type, since users write lenses, too.

    Raises:
        MetadataError: The lens returned something else.
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
    later_forms = [_apply_in_order(lenses[1:], part) for part in first.shards]

    def merge(parts: Sequence[Any]) -> Any:
        left = iter(parts)
        return first.merge([each.merge(list(islice(left, len(each.shards)))) for each in later_forms])

    return StoredForm(tuple(chain.from_iterable(each.shards for each in later_forms)), merge)


# Checks and reshapes that lenses share.

Shape = tuple[int, ...]
T = TypeVar("T")
DESCRIBE = "Describe the model's tensor, for example with `ShardedTensor.from_rank_offsets`."


def check_box(doing: str, shard: ShardedTensor) -> None:
    """Raise unless a shard is a box.

    Raises:
        MetadataError: The value isn't a ShardedTensor.
        ShapeError: The shard is a flat range.
    """
    if not isinstance(shard, ShardedTensor):
        refuse(doing, "shard", type(shard).__name__, "a ShardedTensor", DESCRIBE, error=MetadataError)
    if shard.flattened_range is not None:
        heading = f"{doing}: {shard.key!r} is a flat range, and a lens takes only rectangular blocks"
        found, fix = f"flattened_range={shard.flattened_range}", "Call `as_factory(shard, lens)` for flat ranges."
        raise ShapeError(error_text(heading, found=found, expected="flattened_range=None", fix=fix))


def check_exact(doing: str, shard: ShardedTensor) -> None:
    """Raise unless a shard is a box whose global shape is exact, since stored offsets follow from that shape.

    Raises:
        MetadataError: The value is not a ShardedTensor.
        ShapeError: The shard is a flat range, or its `allow_shape_mismatch` is set.
    """
    check_box(doing, shard)
    if shard.allow_shape_mismatch:
        heading = f"{doing}: {shard.key!r} has no exact global shape"
        fix = "Leave out allow_shape_mismatch, or use `padded_axis` for a padded axis."
        raise ShapeError(error_text(heading, found="allow_shape_mismatch=True", expected="the exact shape", fix=fix))


def checked_axis(doing: str, shard: ShardedTensor, axis: int) -> int:
    """Return an axis of the shard's own tensor as a number from 0 on, after checking that the tensor has it.

    Prepended axes (`prepend_axis_num`) do not count.

    Raises:
        MetadataError: The number isn't an integer.
        ShapeError: The tensor has no such axis.
    """
    axes, number = len(shard.local_shape), integer(doing, "axis", axis)
    if not -axes <= number < axes:
        found, expected = f"axis {number}", f"one of {axes} axes"
        raise ShapeError(error_text(f"{doing}: {shard.key!r} has no such axis", found=found, expected=expected))
    # Prepended axes aren't counted, so that the lens of one layer also works for stacked layers.
    return number % axes


def positive(doing: str, field: str, value: int) -> int:
    """Return a count, after checking that it is an integer of at least 1.

    Raises:
        MetadataError: The value isn't such an integer.
    """
    number = integer(doing, field, value)
    if number < 1:
        refuse(doing, field, number, "1 or more", "Count over all ranks.", error=MetadataError)
    return number


def with_values(values: tuple[T, ...], at: int, new: tuple[T, ...], count: int = 1) -> tuple[T, ...]:
    """Return a tuple in which `count` values, from index `at` on, are replaced by `new`.

    Examples:
        >>> with_values((2, 3, 4), 1, (5, 6))
        (2, 5, 6, 4)
    """
    return (*values[:at], *new, *values[at + count :])


def reshaped(tensor: Any, shape: Shape) -> Any:
    """Return a tensor of another shape: a view where possible, else a copy, bit for bit for any dtype."""
    if not isinstance(tensor, torch.Tensor):
        return tensor.reshape(shape)
    return as_integers(tensor).reshape(shape).view(tensor.dtype)


def flat_axes(tensor: Any, at: int, count: int) -> Any:
    """Return a tensor with `count` axes, from axis `at` on, merged into one in row-major order.

    Some axes of a lazy tensor can't be merged, for example after a transposition. The result is then concatenated from
    the tensor's slices along axis `at`.
    """
    shape = tuple(tensor.shape)
    flat = with_values(shape, at, (prod(shape[at : at + count]),), count)
    try:
        return reshaped(tensor, flat)
    except UnsupportedValue:
        rows = [flat_axes(tensor.select(at, number), at, count - 1) for number in range(shape[at])]
        return torch.cat(rows, dim=at)


def no_elements(shard: ShardedTensor, shape: Shape) -> torch.Tensor:
    """Return a tensor of a shape without elements, with the shard's dtype and device."""
    return empty_data(shape, shard.dtype, device_of(shard.data))


def device_of(data: Any) -> torch.device:
    """Return the device of a shard's tensor; the CPU if there is no tensor, or only a meta tensor."""
    device = getattr(data, "device", None)
    return device if isinstance(device, torch.device) and device.type != "meta" else torch.device("cpu")


# Mappings from patterns of keys to lenses.


def checked_lenses(doing: str, lenses: Mapping[str, Lens | None]) -> dict[str, Lens | None]:
    """Return a checked copy of a mapping from key patterns to lenses; None leaves a tensor unchanged.

    Raises:
        MetadataError: The argument isn't such a mapping.

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

"""Lenses that stack the tensors of layers or experts along an axis of one tensor, or split such a tensor again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..core.geometry import integer, refuse
from ..core.mapping import ShardedTensor
from ..core.trees import join_data
from ..errors import ShapeError, TreeError, error_text
from ._lens import Lens, StoredForm, check_box, check_exact, checked_axis, compose, no_elements, positive, with_values
from ._renamed import check_names, replaced_part
from ._traced import stored_by


def stacked_layers(part: str, layers: int, *, first: int = 0) -> Lens:
    """Return the lens that stacks the tensors of all layers into one stored tensor, along a new first axis.

    The layer's number follows `part` in the key and is removed: ``layers.3.norm.weight`` is entry 3 of
    ``layers.norm.weight``, which is how Megatron-Core stores layers of equal shapes. Tensors are not copied.

    Args:
        part: Part of the key before the number, such as ``"layers"``, ``"decoder.layers"`` or ``"experts"``.
        layers: Number of layers in the whole model.
        first: Number to add to the key's number, if keys count only the layers of one pipeline stage.

    Raises:
        MetadataError: `layers` isn't a positive integer, or `first` isn't an integer.
        TreeError: The key does not have the part followed by a number exactly once, or the layer is not below `layers`.

    Examples:
        >>> shard = ShardedTensor.from_rank_offsets("layers.3.norm.weight", torch.zeros(2))
        >>> [stored] = stacked_layers("layers", 8)(shard).shards
        >>> stored.key, stored.global_shape, stored.global_offset, stored.prepend_axis_num
        ('layers.norm.weight', (8, 2), (3, 0), 1)

    References:
        Megatron-Core 0.16, `TransformerBlock.sharded_state_dict`.
    """
    doing = "stacked_layers"
    check_names(doing, part, [part], 1)
    count, base = positive(doing, "layers", layers), integer(doing, "first", first)
    # Dots or ends on both sides: `layers.1` mustn't match in `layers.12`. Eighteen digits fit an int64.
    expression = re.compile(rf"(?<![^.]){re.escape(part)}\.([0-9]{{1,18}})(?![^.])")

    def lens(shard: ShardedTensor) -> StoredForm:
        check_box(doing, shard)
        key, number = _without_number(shard.key, part, expression)
        if not 0 <= number + base < count:
            heading, expected = f"{doing}: layer number of {shard.key!r} is out of range", f"0 to {count - 1}"
            found = f"{number} + first={base}, which is {number + base}" if base else number
            fix = "Pass the number of layers in the whole model as layers=, and the stage's first layer as first=."
            raise TreeError(error_text(heading, found=found, expected=expected, fix=fix))
        fragments = shard.axis_fragmentations
        stack = replace(
            shard,
            key=key,
            global_shape=(count, *shard.global_shape),
            global_offset=(number + base, *shard.global_offset),
            axis_fragmentations=None if fragments is None else (count, *fragments),
            prepend_axis_num=shard.prepend_axis_num + 1,
        )
        return StoredForm((stack,), lambda parts: parts[0])

    return lens


def _without_number(key: str, part: str, expression: re.Pattern[str]) -> tuple[str, int]:
    matches = list(expression.finditer(key))
    if len(matches) != 1:
        heading = f"stacked_layers: '{part}.<number>' does not occur exactly once in the key {key!r}"
        fix = "Pass a part= that occurs once before a number: one name, or adjacent names, as in 'decoder.layers'."
        raise TreeError(error_text(heading, found=f"{len(matches)} occurrences", expected="one", fix=fix))
    [place] = matches
    return f"{key[: place.start()]}{part}{key[place.end() :]}", int(place[1])


def unstacked_layers(part: str) -> Lens:
    """Return the lens that splits a tensor of stacked layers into one stored tensor for each layer, each with a key.

    Stored boxes are always views. If the layers are the first axis of the rank's own tensor, its box may hold several
    of them. If they are a prepended axis, which only the global shape has, the box holds one layer.

    Args:
        part: Part of the key after which the layer's number is inserted: ``"layers"`` makes ``layers.3.norm.weight``
            from ``layers.norm.weight``.

    Raises:
        TreeError: The key doesn't have the part.
        ShapeError: The tensor is a scalar, or has layers beyond its global shape.

    Examples:
        >>> held = ShardedTensor.from_rank_offsets("layers.bias", torch.zeros(2, 3), (0, 1, 2))
        >>> [(shard.key, shard.global_shape) for shard in unstacked_layers("layers")(held).shards]
        [('layers.2.bias', (3,)), ('layers.3.bias', (3,))]
    """
    check_names("unstacked_layers", part, [part], 1)
    return lambda shard: unstacked("unstacked_layers", shard, part, 0)


def unstacked(doing: str, shard: ShardedTensor, part: str, place: int) -> StoredForm:
    """Return the stored form of a box of stacked layers: one shard with its own key for each layer.

    Args:
        doing: Name of the lens in errors.
        shard: Box of the stacked layers.
        part: Part of the key after which the layer's number is inserted.
        place: Axis of the layers in the global tensor, counting prepended axes.
    """
    check_box(doing, shard)
    if not shard.global_shape:
        fix = "Apply the lens only to tensors that have an axis of layers."
        refuse(f"{doing}: {shard.key!r}", "global_shape", (), "an axis of layers", fix, error=ShapeError)
    begin, is_prepended = shard.global_offset[place], place < shard.prepend_axis_num
    count = 1 if is_prepended else shard.local_shape[0]
    if begin + count > shard.global_shape[place]:
        heading = f"{doing}: {shard.key!r} has layers beyond its global shape"
        found, expected = f"layers {begin} to {begin + count - 1}", f"layers 0 to {shard.global_shape[place] - 1}"
        fix = "If the layers beyond these are padding, leave them out: compose(padded_axis(...), this lens)."
        raise ShapeError(error_text(heading, found=found, expected=expected, fix=fix))
    shards = [
        layer_at(shard, place, number, replaced_part(doing, shard.key, part, f"{part}.{begin + number}"))
        for number in range(count)
    ]
    if is_prepended:
        return StoredForm(tuple(shards), lambda parts: parts[0])

    def merge(parts: Sequence[Any]) -> Any:
        return join_data(torch.stack, parts, 0) if parts else no_elements(shard, shard.local_shape)

    return StoredForm(tuple(shards), merge)


def layer_at(shard: ShardedTensor, place: int, number: int, key: str) -> ShardedTensor:
    """Return one layer of a box of stacked layers, as a view without the axis of the layers.

    Args:
        shard: Box of the stacked layers.
        place: Axis of the layers in the global tensor, counting prepended axes.
        number: Index of the layer within the box.
        key: Key of the layer.
    """
    is_prepended, fragments = place < shard.prepend_axis_num, shard.axis_fragmentations
    whole = shard.data is None or is_prepended
    return replace(
        shard,
        key=key,
        data=shard.data if whole else shard.data[number],
        local_shape=shard.local_shape if is_prepended else shard.local_shape[1:],
        global_shape=with_values(shard.global_shape, place, ()),
        global_offset=with_values(shard.global_offset, place, ()),
        axis_fragmentations=None if fragments is None else with_values(fragments, place, ()),
        prepend_axis_num=shard.prepend_axis_num - is_prepended,
    )


# Experts concatenated along an axis: stored with an axis of their own, or a key each.


def expert_stack(*, experts: int, axis: int = 0) -> Lens:
    """Return the lens that splits concatenated experts along a new first axis, with one index for each expert.

    Stored boxes are always views. Experts that have a key each are stacked by `stacked_layers` instead.

    Args:
        experts: Number of experts on all ranks together; they have equal parts of the axis.
        axis: Axis along which they are concatenated.

    Raises:
        MetadataError: `experts` isn't an integer of at least 1.
        ShapeError: The tensor has no such axis, or the experts don't divide it.

    Examples:
        >>> import torch
        >>> shard = ShardedTensor.from_rank_offsets("experts.fc1", torch.zeros(5, 6), (1, 1, 2))  # (h, e * f)
        >>> [(part.global_shape, part.global_offset) for part in expert_stack(experts=4, axis=1)(shard).shards]
        [((4, 5, 3), (2, 0, 0))]
    """
    count = positive("expert_stack", "experts", experts)
    return lambda shard: _split_experts("expert_stack", shard, count, axis)


def expert_keys(part: str, *, experts: int, axis: int = 0) -> Lens:
    """Return the lens that splits concatenated experts into a stored tensor for each expert, with a key of its own.

    Stored boxes are always views. If the tensor's first axis already counts experts, use `unstacked_layers` instead.

    Args:
        part: Part of the key after which the expert's number is inserted: ``"experts"`` in ``mlp.experts.fc1.weight``.
        experts: Number of experts on all ranks together; they have equal parts of the axis.
        axis: Axis along which they are concatenated.

    Raises:
        MetadataError: `experts` isn't an integer of at least 1.
        TreeError: The key doesn't have the part.
        ShapeError: The tensor has no such axis, or the experts don't divide it.

    Examples:
        >>> import torch
        >>> shard = ShardedTensor.from_rank_offsets("experts.fc2", torch.zeros(6, 5), (0, 1, 2))
        >>> [(each.key, each.global_shape) for each in expert_keys("experts", experts=4)(shard).shards]
        [('experts.2.fc2', (3, 5)), ('experts.3.fc2', (3, 5))]
    """
    count = positive("expert_keys", "experts", experts)
    check_names("expert_keys", part, [part], 1)
    return compose(
        lambda shard: _split_experts("expert_keys", shard, count, axis),
        lambda shard: unstacked("expert_keys", shard, part, shard.prepend_axis_num),
    )


def _split_experts(doing: str, shard: ShardedTensor, experts: int, axis: int) -> StoredForm:
    check_exact(doing, shard)
    at = checked_axis(doing, shard, axis)
    if (length := shard.global_shape[at + shard.prepend_axis_num]) % experts:
        heading = f"{doing}: {shard.key!r} cannot be divided into {experts} experts along axis {at}"
        raise ShapeError(error_text(heading, found=f"length {length}", expected=f"a multiple of {experts}"))
    return stored_by(_Experts(experts, at), doing, shard, shard.prepend_axis_num, keep_views=True)


@dataclass(frozen=True, slots=True)
class _Experts:
    """Function that moves concatenated experts of a whole tensor to a new first axis.

    Equal functions compare equal, so that each is traced once.

    Attributes:
        count: Number of experts.
        axis: Axis along which they are concatenated.
    """

    count: int
    axis: int

    def __call__(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        each = tensor.shape[self.axis] // self.count
        # Experts come to the front, where keys or a prepended axis can count them.
        apart: torch.Tensor = tensor.unflatten(self.axis, (self.count, each))  # type: ignore[no-untyped-call]
        return {"": apart.movedim(self.axis, 0)}

"""Factories made from lenses, for boxes and flat ranges of parameters and of their optimizer states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from typing import Any

import torch

from ..core.geometry import box_column, check_flat_range, flat_boxes, refuse
from ..core.lazy import LazyTensor, as_integers, only_filled, stored
from ..core.mapping import LocalNonpersistentObject, ReplicaId, ShardedTensor, ShardedTensorFactory
from ..core.trees import empty_data, join_data, leaves_with_paths, map_shards, match_key
from ..errors import MetadataError, ShapeError, TreeError, error_text, plural
from ._lens import DESCRIBE, Lens, StoredForm, built_by, check_function, checked_lenses, device_of, flat_axes, reshaped

# Flat ranges to boxes, and back.


def boxes_of(shard: ShardedTensor) -> tuple[ShardedTensor, ...]:
    """Return the boxes that make up a flat shard, as views in row-major order; at most ``2 * axes - 1``.

    Code that doesn't support flat ranges can use the boxes: they hold the same elements of the same global tensor.

    Args:
        shard: Flat shard, with or without data; a shard without a flat range is returned unchanged.

    Returns:
        Boxes of an irregular grid (their `axis_fragmentations` is None). An empty range gives no boxes; but if the
        shard's whole box is empty, that box is returned.

    Raises:
        ShapeError: The argument isn't a shard.

    Examples:
        >>> flat = ShardedTensor.from_rank_offsets_flat("w", torch.arange(7), (3, 4), flattened_range=slice(2, 9))
        >>> for box in boxes_of(flat):
        ...     print(box.global_offset, box.data.tolist())
        (0, 2) [[0, 1]]
        (1, 0) [[2, 3, 4, 5]]
        (2, 0) [[6]]
    """
    _check_shard(shard, "boxes_of")
    flat = shard.flattened_range
    if flat is None:
        return (shard,)
    # Some rank must store an empty tensor, or it would be missing.
    if not prod(shard.local_shape):
        return (_box(shard, (0,) * len(shard.local_shape), shard.local_shape, 0),)
    axes = len(shard.local_shape)
    shape, (start, stop) = box_column([shard.local_shape], fill=1), box_column([[flat.start], [flat.stop]], fill=0)
    _, offsets, shapes, positions = flat_boxes(shape, start, stop)
    first = offsets.shape[1] - axes  # columns describe a scalar by one axis
    rows = zip(offsets[:, first:].tolist(), shapes[:, first:].tolist(), positions.tolist(), strict=True)
    return tuple(_box(shard, tuple(offset), tuple(size), position) for offset, size, position in rows)


def flat_of(shard: ShardedTensor, tensors: Sequence[Any]) -> ShardedTensor:
    """Return a flat shard with new data, which are joined from one tensor for each box; the inverse of `boxes_of`.

    Args:
        shard: Flat shard, with or without data.
        tensors: New tensor of each box in `boxes_of(shard)`, in that order.

    Raises:
        ShapeError: Tensors have other shapes than the boxes, or several dtypes; the error names each of them.

    Examples:
        >>> flat = ShardedTensor.from_rank_offsets_flat("w", torch.arange(3), (2, 2), flattened_range=slice(1, 4))
        >>> flat_of(flat, [10 * box.data for box in boxes_of(flat)]).data
        tensor([ 0, 10, 20])
    """
    _check_shard(shard, "flat_of")
    tensors = _checked_tensors(shard, tensors)
    if shard.flattened_range is None:
        return replace(shard, data=tensors[0], dtype=tensors[0].dtype)
    parts = [reshaped(tensor, (-1,)) for tensor in tensors]
    if not parts:
        return replace(shard, data=torch.empty(0, dtype=shard.dtype, device="cpu"))
    data = parts[0] if len(parts) == 1 else join_data(torch.cat, parts, 0)
    return replace(shard, data=data, dtype=data.dtype)


def _checked_tensors(shard: ShardedTensor, tensors: Any) -> list[Any]:
    """Return the tensors as a list, after checking their number, their shapes and that they have one dtype."""
    subject, boxes = f"flat_of: {shard.key!r}", boxes_of(shard)
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Iterable):
        found, expected = type(tensors).__name__, "a list of tensors, one for each of `boxes_of(shard)`"
        raise ShapeError(error_text(f"{subject}: argument is not a list of tensors", found=found, expected=expected))
    values = list(tensors)
    if len(values) != len(boxes):
        found, expected = plural(len(values), "tensor"), f"{len(boxes)}, one for each of `boxes_of(shard)`"
        raise ShapeError(error_text(f"{subject}: wrong number of tensors", found=found, expected=expected))
    pairs = enumerate(zip(values, boxes, strict=True))
    wrong = [f"tensor {number}: {text}" for number, (one, box) in pairs if (text := _misfit(one, box)) is not None]
    if wrong:
        raise ShapeError(error_text(f"{subject}: tensors do not match `boxes_of(shard)`", offenders=wrong))
    if len({tensor.dtype for tensor in values}) > 1:
        of_each = [f"tensor {number}: {tensor.dtype}" for number, tensor in enumerate(values)]
        fix = "Convert them to one dtype."
        raise ShapeError(error_text(f"{subject}: tensors have several dtypes", offenders=of_each, fix=fix))
    return values


def _misfit(tensor: Any, box: ShardedTensor) -> str | None:
    shape = getattr(tensor, "shape", type(tensor).__name__)
    if shape != box.local_shape:
        return f"{shape}, not {box.local_shape}"
    return None if isinstance(tensor, (torch.Tensor, LazyTensor)) else f"{type(tensor).__name__}, not a tensor"


def _box(shard: ShardedTensor, offset: tuple[int, ...], shape: tuple[int, ...], position: int) -> ShardedTensor:
    front = shard.prepend_axis_num
    base = shard.global_offset
    place = tuple(first + more for first, more in zip(base[front:], offset, strict=True))
    data = None if shard.data is None else shard.data.narrow(0, position, prod(shape)).reshape(shape)
    return replace(
        shard,
        data=data,
        local_shape=shape,
        global_offset=(*base[:front], *place),
        axis_fragmentations=None,
        flattened_range=None,
    )


def _check_shard(shard: Any, doing: str) -> None:
    if not isinstance(shard, ShardedTensor):
        fix = "Apply factories first: what they build are shards." if hasattr(shard, "build") else None
        heading = f"{doing}: the argument is not a shard"
        raise ShapeError(error_text(heading, found=type(shard).__name__, expected="a ShardedTensor", fix=fix))


_MERGE = "merge"
_STATES = "**.optimizer.state.*."


def as_factory(shard: ShardedTensor, lens: Lens) -> ShardedTensorFactory:
    """Return the factory that stores a shard through a lens.

    `dataclasses.replace` adapts the factory: with another key and data, it stores an optimizer's state; with
    `flattened_range`, a flat range. A flat range is stored as a few boxes, which any layout can load.

    Args:
        shard: Box of the model's tensor, or a flat range of one, with or without data.
        lens: Lens from the model's tensor to the stored ones.

    Returns:
        A factory. It builds a dict: "0", "1" and so on are the stored shards, and "merge" is the function that merges
        their tensors.

    Raises:
        MetadataError: The arguments are not a shard and a lens. At build time: the flat range exceeds the box.
        ShapeError: At build time: the data has another shape than the box or the flat range.

    Examples:
        >>> from shardtree.lenses import transposed
        >>> factory = as_factory(ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 2)), transposed())
        >>> factory.build()["0"].global_shape
        (3, 4)
        >>> moment = replace(factory, key="exp_avg.w", data=torch.zeros(4), flattened_range=slice(1, 5))
        >>> [(leaf.local_shape, leaf.global_offset) for name, leaf in moment.build().items() if name != "merge"]
        [((2, 1), (1, 2)), ((2, 1), (0, 3))]
    """
    check_function("as_factory", "lens", lens)
    if not isinstance(shard, ShardedTensor):
        refuse("as_factory", "shard", type(shard).__name__, "a ShardedTensor", DESCRIBE, error=MetadataError)
    build = _Build(replace(shard, data=None, flattened_range=None), lens)
    return ShardedTensorFactory(shard.key, shard.data, build, _merge, shard.replica_id, shard.flattened_range)


@dataclass(frozen=True, slots=True, eq=False)
class _Build:
    """The build function of a factory; it makes the stored shards of a rank's box, or of a flat range of that box.

    Attributes:
        box: The rank's whole box of the model's tensor, without data.
        lens: Lens from the model's tensor to the stored ones.
    """

    box: ShardedTensor
    lens: Lens

    def __call__(self, key: str, data: Any, replica_id: ReplicaId, flattened_range: slice | None) -> dict[str, Any]:
        shape = self.box.local_shape
        if flattened_range is not None:
            check_flat_range(f"factory of {key!r}", flattened_range, shape)
            shape = (flattened_range.stop - flattened_range.start,)
        data = _checked_data(key, data, shape)
        dtype = self.box.dtype if data is None else data.dtype
        whole = data if flattened_range is None else None
        held_box = replace(self.box, key=key, data=whole, dtype=dtype, replica_id=replica_id)
        if flattened_range is None:
            form = built_by(self.lens, held_box)
        else:
            form = _flat_form(held_box, data, flattened_range, self.lens)
        shards = {str(number): part for number, part in enumerate(form.shards)}
        # The tree carries the merge function: `merge_fn` must be the same for a parameter, its moments and each flat
        # range, whose boxes differ, and only the tree is passed from build to merge.
        return {**shards, _MERGE: LocalNonpersistentObject(lambda tree: _check_and_merge(tree, key, form))}

    def for_target(self, key: str, data: Any, replica_id: ReplicaId, flattened_range: slice | None) -> dict[str, Any]:
        """Return the built tree for the target of a load: the data are memory to fill, whose elements are not read."""
        if self.box.allow_shape_mismatch:  # elements that aren't stored keep the target's values
            return self(key, data, replica_id, flattened_range)
        with only_filled():
            return self(key, data, replica_id, flattened_range)


def _check_and_merge(tree: Mapping[str, Any], key: str, form: StoredForm) -> Any:
    """Return the merged tensor, after checking that the parts have the shapes of the built shards."""
    boxes: list[Any] = [part.local_shape for part in form.shards]
    parts: list[Any] = [tree.get(str(number)) for number in range(len(boxes))]
    shapes = [tuple(part.shape) if hasattr(part, "shape") else type(part).__name__ for part in parts]
    if shapes != boxes:
        heading, fix = (
            f"factory of {key!r}: the tensors to merge do not have the shapes of the shards that `build` returned",
            "Pass the result of `build` to the load as its target, and merge what the load returns.",
        )
        raise ShapeError(error_text(heading, found=_shapes_text(shapes), expected=_shapes_text(boxes), fix=fix))
    return form.merge(parts)


def _shapes_text(shapes: Sequence[Any]) -> str:
    return ", ".join(map(str, shapes[:5])) + (f" and {len(shapes) - 5} more" if len(shapes) > 5 else "")


def _merge(tree: Mapping[str, Any]) -> Any:
    merge = tree[_MERGE]
    call = merge.unwrap() if isinstance(merge, LocalNonpersistentObject) else merge
    return call(tree)


def _flat_form(shard: ShardedTensor, data: Any, flat: slice, lens: Lens) -> StoredForm:
    """Return the stored form of a flat range: the lens is applied to each box that makes up the range."""
    # Where a lens moves rows, a flat range of the model's tensor is no flat range of the stored one. Boxes stay boxes,
    # and any layout can load them.
    forms = [built_by(lens, box) for box in boxes_of(replace(shard, data=data, flattened_range=flat))]

    def merge(parts: Sequence[Any]) -> Any:
        left = iter(parts)
        boxes = (each.merge(list(islice(left, len(each.shards)))) for each in forms)
        tensors = [flat_axes(box, 0, len(box.shape)) for box in boxes]
        if not tensors:
            return empty_data((0,), shard.dtype, device_of(data))
        example = next((box for box, each in zip(tensors, forms, strict=True) if each.shards), tensors[0])
        tensors = [_place_like(example, box) for box in tensors]
        return tensors[0] if len(tensors) == 1 else join_data(torch.cat, tensors, 0)

    return StoredForm(tuple(part for each in forms for part in each.shards), merge)


def _place_like(example: Any, box: Any) -> Any:
    """Return a merged box on the device of `example`, or as a lazy tensor if `example` is lazy.

    A box of nothing but padding has no stored tensor that would determine its device.
    """
    if not isinstance(box, torch.Tensor):
        return box
    if isinstance(example, torch.Tensor):
        return box.to(example.device)
    # The value is part of the name, by which conversions tell lazy tensors apart; as an integer, since some dtypes have
    # no `item`.
    name = f"padding of {as_integers(box)[:1].tolist()}"
    return stored(lambda at, shape: box[at[0] : at[0] + shape[0]].clone(), box.shape, box.dtype, name=name)


def _checked_data(key: str, data: Any, shape: tuple[int, ...]) -> Any:
    actual = tuple(data.shape) if hasattr(data, "shape") else type(data).__name__
    if data is not None and actual != shape:
        heading = f"factory of {key!r}: the data has another shape than its shard"
        fix = "If this is an optimizer state whose shape differs from its parameter's, store it without this factory."
        raise ShapeError(error_text(heading, found=actual, expected=shape, fix=fix))
    return data.detach() if isinstance(data, torch.Tensor) else data  # views of a parameter would require gradients


def factories_by_pattern(tree: Any, lenses: Mapping[str, Lens | None], *, absent: Iterable[str] = ()) -> Any:
    """Return the tree with factories in the place of tensors whose keys match a pattern; all other leaves are shared.

    Args:
        tree: Tree of shards.
        lenses: Lens of each pattern of keys, or None for tensors that stay unchanged. ``*`` matches one part between
            dots of a key, ``**`` any number of parts. The first matching pattern counts. A state of an optimizer is
            matched by its parameter's key, which follows ``optimizer.state.<name>.``. States of another shape than
            their parameter, such as ``step``, need an earlier pattern of their own.
        absent: Patterns that may match nothing on this rank, such as patterns of another pipeline stage's layers.

    Raises:
        MetadataError: `lenses` doesn't map patterns to lenses, or `absent` isn't a list of patterns.
        TreeError: A pattern matches no key, so that its tensors would be stored unchanged.

    Examples:
        >>> from shardtree.lenses import transposed
        >>> tree = {"w": ShardedTensor.from_rank_offsets("up.weight", torch.zeros(2, 3)), "step": 3}
        >>> type(factories_by_pattern(tree, {"**.weight": transposed()})["w"]).__name__
        'ShardedTensorFactory'
    """
    lenses = checked_lenses("factories_by_pattern", lenses)
    if isinstance(absent, str):
        fix = "Pass a list of patterns."
        refuse("factories_by_pattern", "absent", repr(absent)[:100], "a list of patterns", fix, error=MetadataError)
    shards = [leaf for _, leaf in leaves_with_paths(tree) if isinstance(leaf, ShardedTensor)]
    patterns = {id(leaf): next((each for each in lenses if _fits(each, leaf.key)), None) for leaf in shards}
    unused = [repr(pattern) for pattern in lenses if pattern not in {*patterns.values(), *absent}]
    if unused:
        fix = "Correct them, or pass absent=[...] for tensors that other ranks hold."
        raise TreeError(error_text("factories_by_pattern: patterns match no tensor", offenders=unused, fix=fix))
    rows = {number: lenses[pattern] for number, pattern in patterns.items() if pattern is not None}
    return map_shards(lambda leaf: leaf if (lens := rows.get(id(leaf))) is None else as_factory(leaf, lens), tree)


def _fits(pattern: str, key: str) -> bool:
    """Return whether a pattern matches a key or, for an optimizer's state, its parameter's key."""
    # Parameters and their states must be stored in one form.
    return any(match_key(each, key) is not None for each in (pattern, _STATES + pattern))

"""Factories from lenses: for boxes and flat ranges, for parameters and their optimizer states."""

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
    """Return the boxes that a flat shard consists of, at most ``2 * axes - 1``, as views, in the order of its elements.

    They hold the same elements of the same global tensor, for code that doesn't support flat ranges.

    Args:
        shard: a flat one, with data or without; one that is a box already is returned as it is.

    Returns:
        Boxes of an irregular grid. A range without elements has none; that of a box without elements is the box.

    Raises:
        ShapeError: it isn't a shard.

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
    """Return a flat shard with new data: tensors of exactly the boxes that it consists of; undoes `boxes_of`.

    Args:
        shard: the flat one, with data or without.
        tensors: one for each of `boxes_of(shard)`, in that order.

    Raises:
        ShapeError: they aren't of these boxes, or of several dtypes; names each of them.

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
    """Return a shard's tensors, after checking that they are its boxes', and of one dtype."""
    subject, boxes = f"flat_of: {shard.key!r}", boxes_of(shard)
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Iterable):
        found, expected = type(tensors).__name__, "a list of them, one for each of `boxes_of(shard)`"
        raise ShapeError(error_text(f"{subject}: not tensors", found=found, expected=expected))
    values = list(tensors)
    if len(values) != len(boxes):
        found, expected = plural(len(values), "tensor"), f"{len(boxes)}, one for each of `boxes_of(shard)`"
        raise ShapeError(error_text(subject, found=found, expected=expected))
    pairs = enumerate(zip(values, boxes, strict=True))
    wrong = [f"tensor {number}: {text}" for number, (one, box) in pairs if (text := _misfit(one, box)) is not None]
    if wrong:
        raise ShapeError(error_text(f"{subject}: tensors of other boxes", offenders=wrong))
    if len({tensor.dtype for tensor in values}) > 1:
        of_each = [f"tensor {number}: {tensor.dtype}" for number, tensor in enumerate(values)]
        fix = "Convert them to one dtype."
        raise ShapeError(error_text(f"{subject}: tensors of several dtypes", offenders=of_each, fix=fix))
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
        what = f"{doing}: not a shard"
        raise ShapeError(error_text(what, found=type(shard).__name__, expected="a ShardedTensor", fix=fix))


_MERGE = "merge"
_STATES = "**.optimizer.state.*."


def as_factory(shard: ShardedTensor, lens: Lens) -> ShardedTensorFactory:
    """Return the factory that stores a shard through a lens.

    It may be changed by `dataclasses.replace`: another key and data make it the factory of an optimizer's state, and
    one of a flat range with `flattened_range`. A flat range is stored as the few boxes that it consists of, which any
    layout can load.

    Args:
        shard: a box of the tensor that the model holds, or a flat range of one; with data or without.
        lens: from it to what is stored.

    Returns:
        A factory whose built tree has the shards by number, and the function that merges them.

    Raises:
        MetadataError: the arguments aren't a shard and a lens; when it builds: the range leaves the box.
        ShapeError: when it builds: data that isn't of the box's or the range's shape.

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
    build = _Build(replace(shard.without_data(), flattened_range=None), lens)
    return ShardedTensorFactory(shard.key, shard.data, build, _merge, shard.replica_id, shard.flattened_range)


@dataclass(frozen=True, slots=True, eq=False)
class _Build:
    """The build function of a factory: what a lens stores of a box, or of a flat range of it.

    Attributes:
        box: the shard of the whole box, without data.
        lens: from it to what is stored.
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
        own = replace(self.box, key=key, dtype=dtype, replica_id=replica_id)
        if flattened_range is None:
            form = built_by(self.lens, replace(own, data=data))
        else:
            form = _flat_form(own, data, flattened_range, self.lens)
        shards = {str(number): part for number, part in enumerate(form.shards)}
        # What merging needs travels in the tree: `merge_fn` must be one function for a parameter, its moments and each
        # flat range, whose boxes differ, and only the tree reaches both build and merge.
        return {**shards, _MERGE: LocalNonpersistentObject(lambda tree: _check_and_merge(tree, key, form))}

    def for_target(self, key: str, data: Any, replica_id: ReplicaId, flattened_range: slice | None) -> dict[str, Any]:
        """Return what is built of memory that will be filled: no element of it is read, whatever the lens computes."""
        if self.box.allow_shape_mismatch:  # what isn't stored stays as the target has it
            return self(key, data, replica_id, flattened_range)
        with only_filled():
            return self(key, data, replica_id, flattened_range)


def _check_and_merge(tree: Mapping[str, Any], key: str, form: StoredForm) -> Any:
    """Return the merged tensor, after checking that the parts are what was built."""
    boxes: list[Any] = [part.local_shape for part in form.shards]
    parts: list[Any] = [tree.get(str(number)) for number in range(len(boxes))]
    shapes = [tuple(part.shape) if hasattr(part, "shape") else type(part).__name__ for part in parts]
    if shapes != boxes:
        what, fix = f"factory of {key!r}: not what was built", "Merge what was loaded for the tree that it built."
        raise ShapeError(error_text(what, found=_shapes_text(shapes), expected=_shapes_text(boxes), fix=fix))
    return form.merge(parts)


def _shapes_text(shapes: Sequence[Any]) -> str:
    return ", ".join(map(str, shapes[:5])) + (f" and {len(shapes) - 5} more" if len(shapes) > 5 else "")


def _merge(tree: Mapping[str, Any]) -> Any:
    merge = tree[_MERGE]
    call = merge.unwrap() if isinstance(merge, LocalNonpersistentObject) else merge
    return call(tree)


def _flat_form(shard: ShardedTensor, data: Any, flat: slice, lens: Lens) -> StoredForm:
    """Return the stored form of a flat range of a box: that of each of its boxes."""
    # Stored as boxes: where a lens moves rows, a range of what is held is no range of what is stored, and any layout
    # can load boxes.
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
    """Return a merged box where another was loaded to, which nothing tells one that stores nothing: it is padding."""
    if not isinstance(box, torch.Tensor):
        return box
    if isinstance(example, torch.Tensor):
        return box.to(example.device)
    # The number is in the name: a conversion is recognised by it. As an integer, since torch has no `item` of some.
    name = f"padding of {as_integers(box)[:1].tolist()}"
    return stored(lambda at, shape: box[at[0] : at[0] + shape[0]].clone(), box.shape, box.dtype, name=name)


def _checked_data(key: str, data: Any, shape: tuple[int, ...]) -> Any:
    actual = tuple(data.shape) if hasattr(data, "shape") else type(data).__name__
    if data is not None and actual != shape:
        what = f"factory of {key!r}: data of another shape than its shard"
        fix = "A state of another shape than its parameter needs a rule of its own."
        raise ShapeError(error_text(what, found=actual, expected=shape, fix=fix))
    return data.detach() if isinstance(data, torch.Tensor) else data  # views of a parameter would require gradients


def factories_by_pattern(tree: Any, lenses: Mapping[str, Lens | None], *, absent: Iterable[str] = ()) -> Any:
    """Return the tree with factories instead of tensors whose keys match a pattern; the rest is shared.

    Args:
        tree: any tree of shards.
        lenses: pattern -> lens, or None where a tensor stays as it is; ``*`` matches one part between dots of a key,
            ``**`` any number. The first one that matches the key counts; for an optimizer's state, the parameter's
            key after ``optimizer.state.<name>.``. States of another shape than their parameter, such as ``step``, need
            a pattern of their own before it.
        absent: patterns that may match nothing on this rank, as those of other pipeline stages' layers.

    Raises:
        MetadataError: the lenses aren't patterns and lenses, or `absent` isn't a list of patterns.
        TreeError: a pattern fits no key, so that its tensors would be stored unchanged.

    Examples:
        >>> from shardtree.lenses import transposed
        >>> tree = {"w": ShardedTensor.from_rank_offsets("up.weight", torch.zeros(2, 3)), "step": 3}
        >>> type(factories_by_pattern(tree, {"**.weight": transposed()})["w"]).__name__
        'ShardedTensorFactory'
    """
    lenses = checked_lenses("factories_by_pattern", lenses)
    if isinstance(absent, str):
        fix = "Put it into a list."
        refuse("factories_by_pattern", "absent", repr(absent)[:100], "a list of patterns", fix, error=MetadataError)
    shards = [leaf for _, leaf in leaves_with_paths(tree) if isinstance(leaf, ShardedTensor)]
    patterns = {id(leaf): next((each for each in lenses if _fits(each, leaf.key)), None) for leaf in shards}
    unused = [repr(pattern) for pattern in lenses if pattern not in {*patterns.values(), *absent}]
    if unused:
        fix = "Correct them, or pass absent=[...] for tensors that other ranks hold."
        raise TreeError(error_text("factories_by_pattern: patterns that fit no tensor", offenders=unused, fix=fix))
    rows = {number: lenses[pattern] for number, pattern in patterns.items() if pattern is not None}
    return map_shards(lambda leaf: leaf if (lens := rows.get(id(leaf))) is None else as_factory(leaf, lens), tree)


def _fits(pattern: str, key: str) -> bool:
    """Return whether a pattern matches a key, or that of a state's parameter: both must be stored in one form."""
    return any(match_key(each, key) is not None for each in (pattern, _STATES + pattern))

"""Lenses from traced code: from a torch function of one tensor, or from a loader that makes a model's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from operator import lt, mul
from typing import Any

import torch

from ..core.geometry import refuse, slices
from ..core.lazy import Box, LazyTensor, dense
from ..core.mapping import ShardedTensor, given_tensor, lacks_memory
from ..core.trees import (
    checked_patterns,
    flatten_with_paths,
    is_plain_tensor,
    key_matcher,
    path_key,
    refuse_scaled,
    scaled_values,
    those_of,
)
from ..errors import MetadataError, ShapeError, TraceError, error_text
from ..traces import Kind, Local, Trace, View, check_written, localized, trace, view_of
from ._factory import as_factory
from ._lens import Lens, Shape, StoredForm, check_box, check_exact, device_of, reshaped
from ._renamed import replaced_part

_TENSOR = "held"


def from_function(function: Callable[[torch.Tensor], Any], *, part: str | None = None, drop: bool = False) -> Lens:
    """Return the lens of a torch function from the model's whole tensor to the stored ones.

    The function is traced once for each shape, and the trace is inverted. So it may only move elements, each exactly
    once, and cast them without rounding. The trace also maps shards, optimizer moments and flat ranges.

    Args:
        function: Function from the whole tensor to a tensor, stored under the same key, or to tensors by name.
        part: Part of the key that the names in the dict replace.
        drop: Whether the function may leave out elements, such as rows of padding. They aren't stored, and are zeros
            once loaded.

    Raises:
        TraceError: When the lens is applied: the function reads values, or is not one to one.
        ShapeError: The function returned a dict although `part` is None, or a tensor although `part` is given.
        TreeError: The key does not have the part exactly once.

    Examples:
        >>> gate_and_up = from_function(lambda w: dict(zip(("gate", "up"), w.chunk(2))), part="fc1")
        >>> shard = ShardedTensor.from_rank_offsets("fc1", torch.arange(3), (0, 1, 2))  # the second of two ranks
        >>> [(each.key, each.global_offset, each.data.tolist()) for each in gate_and_up(shard).shards]
        [('up', (0,), [0, 1, 2])]
    """
    doing = "from_function"

    def whole(tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        output = function(tensor)
        if isinstance(output, Mapping) == (part is None):
            heading = f"{doing}: the function returned {'a' if part is None else 'no'} dict, although part is {part!r}"
            fix = "Pass as part= the part of the key that is replaced by each name in the dict."
            fix = fix if part is None else "Leave out part=, which is only for functions that return a dict."
            raise ShapeError(error_text(heading, fix=fix))
        return output if isinstance(output, Mapping) else {"": output}

    def lens(shard: ShardedTensor) -> StoredForm:
        check_exact(doing, shard)
        return stored_by(whole, doing, shard, shard.prepend_axis_num, part, drop)

    return lens


def stored_by(
    function: Callable[[torch.Tensor], Mapping[str, torch.Tensor]],
    doing: str,
    shard: ShardedTensor,
    front: int,
    part: str | None = None,
    drop: bool = False,
    *,
    keep_views: bool = False,
) -> StoredForm:
    """Return the stored form of a box, given a torch function from the whole tensor to the stored tensors.

    Args:
        function: Function from the whole tensor to the stored tensors by name; equal (`==`) functions are traced once.
        doing: Name of the lens in errors.
        shard: Box of the model's tensor.
        front: Number of leading axes that the function doesn't get.
        part: Part of the key that the name of each stored tensor replaces; None to keep the key.
        drop: Whether the function may leave out elements.
        keep_views: Whether two stored boxes stay separate if each is a view of the data, but both together are not.
    """
    axes = len(shard.global_shape) - front
    shape = (*(1,) * (axes - len(shard.local_shape)), *shard.local_shape)
    data = shard.data if shard.data is None or shape == shard.local_shape else reshaped(shard.data, shape)
    sources, local, copies, back = _plan(
        function, doing, drop, keep_views, shard.global_shape[front:], shard.dtype, shard.global_offset[front:], shape
    )
    names = {name: replaced_part(doing, shard.key, part, name) if part else shard.key for name in sources}
    shards = [
        replace(
            shard,
            key=names[name],
            data=None if data is None else _box_data(data, box, view, copy),
            dtype=sources[name].dtype,
            local_shape=box.shape,
            global_shape=(*shard.global_shape[:front], *sources[name].shape),
            global_offset=(*shard.global_offset[:front], *box.offset),
            axis_fragmentations=None,
            prepend_axis_num=front,
        )
        for (name, box), view, copy in zip(local.boxes, local.views, copies, strict=True)
    ]

    def merge(parts: Sequence[Any]) -> Any:
        alias = _alias(parts[0], shape, back) if len(parts) == 1 else None
        return _merge(local, shard, parts, fill=0) if alias is None else reshaped(alias, shard.local_shape)

    return StoredForm(tuple(shards), merge)


# Memoised by shape and dtype, and by box: a model has few of those, and thousands of tensors.
@lru_cache(maxsize=64)
def _back(function: Callable[[torch.Tensor], Mapping[str, torch.Tensor]], doing: str, drop: bool, kind: Kind) -> Trace:
    there = trace(lambda tensors: function(tensors[_TENSOR]), {_TENSOR: kind})
    names = [name for name, moves in there.moves.items() if any(move.root != _TENSOR for move in moves)]
    if names:
        heading = f"{doing}: the function's outputs have elements that are not from its argument"
        fix = "Let the function only move elements of its argument, without constants and computed values."
        raise TraceError(error_text(heading, offenders=map(repr, filter(None, names)), fix=fix))
    return there.inverse(drop)


@lru_cache(maxsize=1024)
def _plan(
    function: Callable[[torch.Tensor], Mapping[str, torch.Tensor]],
    doing: str,
    drop: bool,
    keep_views: bool,
    whole: Shape,
    dtype: torch.dtype,
    offset: Shape,
    shape: Shape,
) -> tuple[Mapping[str, Kind], Local, list[Local], View | None]:
    """Return the plan for the stored form of a box, which does not depend on the tensor's key.

    Args:
        function: Function from the whole tensor to the stored tensors by name.
        doing: Name of the lens in errors.
        drop: Whether the function may leave out elements.
        keep_views: Whether two stored boxes stay separate if each is a view of the data, but both together are not.
        whole: Shape of the whole tensor, without leading axes that the function does not get.
        dtype: Dtype of the tensor.
        offset: Offset of the box.
        shape: Shape of the box.

    Returns:
        ``(sources, local, copies, view)``: the stored tensors by name; the trace from the stored boxes to this box; a
        trace from this box to each stored box; and this box as a strided view of its stored box. The view is None if
        there are several stored boxes, or if the elements have no regular strides.
    """
    back = _back(function, doing, drop, Kind(whole, dtype))
    # Stored boxes hold elements of this box alone, so that all ranks together store each element once.
    local = localized(back, _TENSOR, offset, shape, most=2**62, keep_views=keep_views)
    if not prod(whole):  # an empty tensor must be stored too, or it would be missing
        boxes = [(name, Box((0,) * len(kind.shape), kind.shape)) for name, kind in back.sources.items()]
        local = replace(local, boxes=tuple(boxes), views=tuple(View(0, (0,) * len(box.shape)) for _, box in boxes))
        return back.sources, local, [local] * len(boxes), None
    there = local.trace.inverse(drop=True)
    whole_boxes = [(str(number), (0,) * len(box.shape), box.shape) for number, (_, box) in enumerate(local.boxes)]
    alone = [move for moves in there.moves.values() for move in moves] if len(local.boxes) == 1 else []
    is_all = len(alone) == 1 and alone[0].numel == prod(shape)
    view = view_of(alone[0], Box((0,) * len(shape), shape), shape) if is_all else None
    return back.sources, local, [localized(there, *each) for each in whole_boxes], view


def _box_data(data: Any, box: Box, view: View | None, copy: Local) -> Any:
    """Return the elements of a stored box: a view of the model's data if possible, else a copy.

    Args:
        data: Data of the model's box.
        box: The stored box.
        view: Strided view that is the stored box if the data is contiguous; None if it must be copied.
        copy: Trace from the model's box to the stored box, which makes a copy.
    """
    alias = _alias(data, box.shape, view)
    return copy.output([data[slices(*own)] for _, own in copy.boxes]) if alias is None else alias


def _alias(tensor: Any, shape: Shape, view: View | None) -> torch.Tensor | None:
    """Return a strided alias of a tensor: the elements that a view selects, without a copy. None if no alias exists.

    Args:
        tensor: Tensor with any strides. A lazy tensor has no alias.
        shape: Shape of the alias.
        view: Offset and strides of the alias as they would be if `tensor` were row-major; the function converts them to
            its actual strides. None: no alias.
    """
    if view is None or not isinstance(tensor, torch.Tensor):
        return None
    if tensor.is_contiguous():
        return tensor.as_strided(shape, view.steps, tensor.storage_offset() + view.at)
    # Steps that stay within their axes can be taken with any strides.
    tensor_shape = tuple(tensor.shape)
    at, *steps = (_along_axes(flat, tensor_shape) for flat in (view.at, *view.steps))
    last = [
        first + sum((size - 1) * step[axis] for size, step in zip(shape, steps, strict=True))
        for axis, first in enumerate(at)
    ]
    if not all(map(lt, last, tensor_shape)):
        return None
    place, *strides = (sum(map(mul, step, tensor.stride())) for step in (at, *steps))
    return tensor.as_strided(shape, strides, tensor.storage_offset() + place)


def _along_axes(flat: int, shape: Shape) -> list[int]:
    """Return a row-major distance between two elements of a tensor as distances along each axis."""
    return [flat // step % size for step, size in zip(dense(shape).stride, shape, strict=True)]


def _merge(local: Local, shard: ShardedTensor, parts: Sequence[Any], fill: float | None = None) -> Any:
    tensor = local.output(parts, fill)
    if isinstance(tensor, LazyTensor):
        return tensor.reshape(shard.local_shape)
    place = next((part.device for part in parts if isinstance(part, torch.Tensor)), device_of(shard.data))
    return tensor.reshape(shard.local_shape).to(place)


def through_trace(tree: Any, found: Trace, *, cast: bool = False, plain: Sequence[str] = ()) -> Any:
    """Return a load's target with factories that compute its tensors from stored tensors, as a trace records.

    Each rank then reads only the boxes of stored tensors from which its own boxes are made; `explain` of the result
    shows them. Tensors that are not outputs of the trace stay unchanged.

    Args:
        tree: Target of a load, made of shards, or of whole plain tensors whose keys are their paths.
        found: Trace from the stored tensors to the target's tensors, by key.
        cast: Whether the target may have other dtypes than the trace's outputs.
        plain: Key patterns of values that may be cast without their scales, as for `load`.

    Raises:
        ShapeError: During the load: an output of the trace has another shape or dtype than the target, or quantised
            values would be cast without their scales.
        TraceError: During the load: the trace never writes some elements of a tensor.

    Examples:
        >>> import shardtree as st
        >>> def load(given):
        ...     return dict(zip(("gate", "up"), given["fc1"].chunk(2)))
        >>> halves = st.trace(load, {"fc1": torch.empty(4, 2)})
        >>> through = through_trace({"up": torch.empty(2, 2)}, halves)
        >>> st.apply_factories(through)["up"]["0"].key
        'fc1'
    """
    if not isinstance(found, Trace):
        fix = "Pass the result of shardtree.trace."
        refuse("transform", "trace", type(found).__name__, "a Trace", fix, error=MetadataError)

    def on_leaf(path: Any, leaf: Any) -> Any:
        if is_plain_tensor(leaf) and path_key(path) in found.outputs:
            leaf = ShardedTensor.from_rank_offsets(path_key(path), leaf)
        is_made = isinstance(leaf, ShardedTensor) and leaf.key in found.outputs
        return as_factory(leaf, partial(_made_form, found, cast, plain)) if is_made else leaf

    pairs, rebuild = flatten_with_paths(tree)
    return rebuild([on_leaf(path, leaf) for path, leaf in pairs])


def _made_form(whole: Trace, cast: bool, plain: Sequence[str], shard: ShardedTensor) -> StoredForm:
    """Return the stored form of a target's box: the boxes of stored tensors from which a trace computes it.

    If the trace only moves elements, a stored box that is contiguous in the target's memory is read directly into it.

    Args:
        whole: Trace from the stored tensors to the target's tensors.
        cast: Whether the target may have another dtype than the trace's output.
        plain: Key patterns of values that may be cast without their scales.
        shard: Box of the target.
    """
    doing = "transform"
    check_box(doing, shard)
    check_written(whole, shard.key, doing)
    kind, target = whole.outputs[shard.key], Kind(shard.global_shape, shard.dtype)
    if kind.shape != target.shape or (kind.dtype is not target.dtype and not cast):
        fix = "Trace the code with the stored tensors, and make the target from the trace's outputs."
        heading = f"{doing}: the trace's {shard.key!r} does not fit the target"
        raise ShapeError(error_text(heading, found=kind, expected=target, fix=fix))
    if kind.dtype is not target.dtype:
        _refuse_without_scales(doing, whole, shard.key, plain)
    shape = (*(1,) * shard.prepend_axis_num, *shard.local_shape)
    local = localized(whole, shard.key, shard.global_offset, shape, keep_views=False)
    # Computed elements need memory of their own, and so do elements that are cast.
    is_moved = kind == target and all(isinstance(move.root, str) for move in whole.moves[shard.key])
    data = given_tensor(shard)
    reused = data if is_moved and not lacks_memory(data) else None
    shards = [
        ShardedTensor(
            name,
            None if reused is None else _row_major(reused.reshape(shape), box.shape, view),
            whole.sources[name].dtype,
            box.shape,
            whole.sources[name].shape,
            box.offset,
            axis_fragmentations=None,
            replica_id=shard.replica_id,
        )
        for (name, box), view in zip(local.boxes, local.views, strict=True)
    ]
    # Parts may be on the target's device or not.
    place = None if data is None else data.device
    return StoredForm(tuple(shards), lambda parts: _merge(local, shard, parts).to(device=place, dtype=shard.dtype))


def _refuse_without_scales(doing: str, trace: Trace, key: str, plain: Sequence[str]) -> None:
    """Raise ShapeError if the cast of a trace's output would lose the scales of quantised values.

    A computed output is accepted: its values were multiplied by their scales.

    Args:
        doing: Name of the operation in errors.
        trace: Trace from stored tensors to outputs.
        key: Key of the output that is cast.
        plain: Key patterns of values that may be cast without their scales.
    """
    roots, is_plain = [move.root for move in trace.moves[key]], key_matcher(checked_patterns(f"{doing}: plain", plain))
    if not all(isinstance(root, str) for root in roots) or any(is_plain(str(each)) for each in (key, *roots)):
        return  # computed values were multiplied by their scales
    for kinds, keys in ((trace.sources, {*map(str, roots)}), (trace.outputs, {key})):
        dtypes = {name: kind.dtype for name, kind in kinds.items()}
        values = {name: dtypes[name] for name in keys}
        refuse_scaled(doing, values, scaled_values(values, those_of(dtypes)))


def _row_major(tensor: torch.Tensor, shape: Shape, view: View | None) -> torch.Tensor | None:
    """Return the strided alias that `_alias` makes if it is contiguous, else None.

    A file can be read directly into a contiguous alias.
    """
    # Other views gain nothing, and aliases among finely interleaved ones take long to rule out.
    alias = _alias(tensor, shape, view)
    return alias if alias is not None and alias.is_contiguous() else None

"""Lenses from traces: of a torch function of one tensor, and of what a trace makes of stored tensors."""

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
from ..traces import Kind, Local, Trace, View, check_written, localized, trace, view_of, whole_shard
from ._factory import as_factory
from ._lens import Lens, Shape, StoredForm, check_box, check_exact, device_of, reshaped
from ._renamed import replaced_part

_TENSOR = "held"


def from_function(function: Callable[[torch.Tensor], Any], *, part: str | None = None, drop: bool = False) -> Lens:
    """Return the lens of a torch function of one whole tensor, from what the model holds to what is stored.

    The function is traced for each shape, and run the other way too: it may only move elements, each exactly once, and
    cast them so that none is rounded. Boxes that ranks hold, moments and flat ranges follow from that.

    Args:
        function: from the whole tensor to a tensor, stored under the same key, or to a dict of tensors.
        part: what of the key the names of that dict replace.
        drop: whether elements that the function doesn't use aren't stored, as rows of padding; loaded, they are zeros.

    Raises:
        TraceError: when a shard is met: the function asks for elements, or isn't one to one.
        ShapeError: it gives a dict and `part` isn't given, or the other way round.
        TreeError: the key has no such part.

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
            fix = "Return a dict with part=..., whose names replace it, or a tensor without."
            raise ShapeError(error_text(f"{doing}: the function gave {type(output).__name__}", fix=fix))
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
    """Return the stored form of a box by a torch function of the whole tensor.

    Args:
        function: from the whole tensor to tensors by name; equal ones, by `==`, are traced once.
        doing: for messages.
        shard: the box.
        front: how many of its axes the function doesn't get.
        part: what of the key the names replace, if anything.
        drop: as of `from_function`.
        keep_views: whether boxes that are views stay apart where they would be one that isn't.
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


# By shape and dtype, and by box: a model has few of them, and thousands of tensors.
@lru_cache(maxsize=64)
def _back(function: Callable[[torch.Tensor], Mapping[str, torch.Tensor]], doing: str, drop: bool, kind: Kind) -> Trace:
    there = trace(lambda tensors: function(tensors[_TENSOR]), {_TENSOR: kind})
    names = [name for name, moves in there.moves.items() if any(move.root != _TENSOR for move in moves)]
    if names:
        fix = "Store what the model holds alone."
        raise TraceError(error_text(f"{doing}: elements that the tensor doesn't have", offenders=names, fix=fix))
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
    """Return what is stored, the boxes that make a held box, what makes each of them, and what one alone is to it."""
    back = _back(function, doing, drop, Kind(whole, dtype))
    # Each box holds nothing but what is held: together, ranks store each element once.
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
    """Return the elements of a box that is stored: a view of what is held where it is one."""
    alias = _alias(data, box.shape, view)
    return copy.output([data[slices(*own)] for _, own in copy.boxes]) if alias is None else alias


def _alias(tensor: Any, shape: Shape, view: View | None) -> torch.Tensor | None:
    """Return a view of a tensor in memory, None if there is none."""
    if view is None or not isinstance(tensor, torch.Tensor):
        return None
    if tensor.is_contiguous():
        return tensor.as_strided(shape, view.steps, tensor.storage_offset() + view.at)
    # Steps that lead along axes, over no axis's end, do so by any strides.
    own = tuple(tensor.shape)
    at, *steps = (_along_axes(flat, own) for flat in (view.at, *view.steps))
    last = [
        first + sum((size - 1) * step[axis] for size, step in zip(shape, steps, strict=True))
        for axis, first in enumerate(at)
    ]
    if not all(map(lt, last, own)):
        return None
    place, *strides = (sum(map(mul, step, tensor.stride())) for step in (at, *steps))
    return tensor.as_strided(shape, strides, tensor.storage_offset() + place)


def _along_axes(flat: int, shape: Shape) -> list[int]:
    """Return a distance in a dense tensor as one along each axis."""
    return [flat // step % size for step, size in zip(dense(shape).stride, shape, strict=True)]


def _merge(local: Local, shard: ShardedTensor, parts: Sequence[Any], fill: float | None = None) -> Any:
    tensor = local.output(parts, fill)
    if isinstance(tensor, LazyTensor):
        return tensor.reshape(shard.local_shape)
    place = next((part.device for part in parts if isinstance(part, torch.Tensor)), device_of(shard.data))
    return tensor.reshape(shard.local_shape).to(place)


def through_trace(tree: Any, found: Trace, *, cast: bool = False, plain: Sequence[str] = ()) -> Any:
    """Return a target whose tensors are made by a trace of what is stored: as factories, which a load merges.

    So each rank asks for the boxes of stored tensors that its own are made of, and for nothing else, as `explain` of
    the result shows. Tensors that the trace doesn't make stay as they are.

    Args:
        tree: a target: shards, or plain tensors, which are whole and have the keys of their paths.
        found: from stored tensors to those of the target, by key.
        cast: whether a target may have another dtype than what the trace makes.
        plain: patterns of keys of values that need no scales, as for `load`.

    Raises:
        ShapeError: the trace makes a tensor of another shape or dtype than the target's, or passes on quantised values
            that would be cast without their scales; when it is loaded.
        TraceError: it never writes elements of one; likewise.

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
        fix = "Pass what shardtree.trace gives."
        refuse("transform", "trace", type(found).__name__, "a Trace", fix, error=MetadataError)

    def on_leaf(path: Any, leaf: Any) -> Any:
        if is_plain_tensor(leaf) and path_key(path) in found.outputs:
            leaf = ShardedTensor.from_rank_offsets(path_key(path), leaf)
        is_made = isinstance(leaf, ShardedTensor) and leaf.key in found.outputs
        return as_factory(leaf, partial(_made_form, found, cast, plain)) if is_made else leaf

    pairs, rebuild = flatten_with_paths(tree)
    return rebuild([on_leaf(path, leaf) for path, leaf in pairs])


def _made_form(whole: Trace, cast: bool, plain: Sequence[str], shard: ShardedTensor) -> StoredForm:
    """Return the boxes that a box of a target is made of, with data where they go as they are: the target's own."""
    doing = "transform"
    check_box(doing, shard)
    check_written(whole, shard.key, doing)
    kind, target = whole.outputs[shard.key], Kind(shard.global_shape, shard.dtype)
    if kind.shape != target.shape or (kind.dtype is not target.dtype and not cast):
        fix = "Trace the code with what is stored, and make the target of what it makes."
        what = f"{doing}: the trace makes another {shard.key!r} than the target"
        raise ShapeError(error_text(what, found=kind, expected=target, fix=fix))
    if kind.dtype is not target.dtype:
        _refuse_without_scales(doing, whole, shard.key, plain)
    shape = (*(1,) * shard.prepend_axis_num, *shard.local_shape)
    local = localized(whole, shard.key, shard.global_offset, shape, keep_views=False)
    # What is computed isn't where its operands are, and bits of another dtype aren't those of the target.
    is_moved = kind == target and all(isinstance(move.root, str) for move in whole.moves[shard.key])
    data = given_tensor(shard)
    own = data if is_moved and not lacks_memory(data) else None
    shards = [
        replace(
            whole_shard(name, whole.sources[name]),
            data=None if own is None else _row_major(own.reshape(shape), box.shape, view),
            local_shape=box.shape,
            global_offset=box.offset,
            axis_fragmentations=None,
            replica_id=shard.replica_id,
        )
        for (name, box), view in zip(local.boxes, local.views, strict=True)
    ]
    # Some parts may be where the target is, and others not.
    place = None if data is None else data.device
    return StoredForm(tuple(shards), lambda parts: _merge(local, shard, parts).to(device=place, dtype=shard.dtype))


def _refuse_without_scales(doing: str, trace: Trace, key: str, plain: Sequence[str]) -> None:
    """Raise where a trace passes on quantised values as they are, which would then be cast without their scales."""
    roots, is_plain = [move.root for move in trace.moves[key]], key_matcher(checked_patterns(f"{doing}: plain", plain))
    if not all(isinstance(root, str) for root in roots) or any(is_plain(str(each)) for each in (key, *roots)):
        return  # what is computed has its scales
    for kinds, keys in ((trace.sources, {*map(str, roots)}), (trace.outputs, {key})):
        dtypes = {name: kind.dtype for name, kind in kinds.items()}
        values = {name: dtypes[name] for name in keys}
        refuse_scaled(doing, values, scaled_values(values, those_of(dtypes)))


def _row_major(tensor: torch.Tensor, shape: Shape, view: View | None) -> torch.Tensor | None:
    """Return a view of a tensor if rows of a file can be read into it as they are, else None."""
    # Others gain nothing, and aliases among finely interleaved ones take long to rule out.
    alias = _alias(tensor, shape, view)
    return alias if alias is not None and alias.is_contiguous() else None

"""Lenses from traces: of a torch function of one tensor, and of what a trace makes of stored tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch

from ..errors import MetadataError, ShapeError, TraceError, error_text
from ..geometry import refuse, slices
from ..lazy import LazyTensor, dense
from ..mapping import ShardedTensor
from ..traces import Kind, Local, Move, Trace, check_written, localized, trace, whole_shard
from ..trees import flatten_with_paths, is_plain_tensor, path_key
from ._factory import as_factory
from ._lens import Lens, StoredForm, check_box, check_exact, device_of
from ._renamed import replaced_part

_HELD = "held"


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

    # By shape and dtype: a model has few of them, and hundreds of layers.
    @lru_cache(maxsize=64)
    def back(shape: tuple[int, ...], dtype: torch.dtype) -> Trace:
        def whole(tensors: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
            found = function(tensors[_HELD])
            if isinstance(found, Mapping) == (part is None):
                fix = "Return a dict with part=..., whose names replace it, or a tensor without."
                raise ShapeError(error_text(f"{doing}: the function gave {type(found).__name__}", fix=fix))
            return found if isinstance(found, Mapping) else {"": found}

        there = trace(whole, {_HELD: Kind(shape, dtype)})
        made = [name for name, moves in there.moves.items() if any(move.root != _HELD for move in moves)]
        if made:
            fix = "Store what the model holds alone."
            raise TraceError(error_text(f"{doing}: elements that the tensor doesn't have", offenders=made, fix=fix))
        return there.inverse(drop)

    def lens(shard: ShardedTensor) -> StoredForm:
        check_exact(doing, shard)
        front = shard.prepend_axis_num
        found = back(shard.global_shape[front:], shard.dtype)
        # Each box holds nothing but what is held: together, ranks store each element once.
        local = localized(found, _HELD, shard.global_offset[front:], shard.local_shape, most=2**62)
        names = {name: replaced_part(doing, shard.key, part, name) if part else shard.key for name in found.sources}
        data = _stored_data(local, shard.data)
        shards = [
            replace(
                shard,
                key=names[name],
                data=each,
                dtype=found.sources[name].dtype,
                local_shape=box.shape,
                global_shape=(*shard.global_shape[:front], *found.sources[name].shape),
                global_offset=(*shard.global_offset[:front], *box.offset),
                axis_fragmentations=None,
            )
            for (name, box), each in zip(local.boxes, data, strict=True)
        ]
        return StoredForm(tuple(shards), lambda parts: _merged(local, shard, parts, fill=0))

    return lens


def _stored_data(local: Local, held: Any) -> list[Any]:
    """Return the elements of each box that is stored, as views of what is held where each is one."""
    if held is None:
        return [None] * len(local.boxes)
    found: list[Any] = []
    there = local.trace.inverse(drop=True)
    for number, (_, box) in enumerate(local.boxes):
        name = str(number)
        moves = there.moves[name]
        steps = _view_steps(moves[0], box.shape) if len(moves) == 1 and not moves[0].via else None
        if steps is not None and isinstance(held, torch.Tensor) and held.is_contiguous():
            found.append(held.as_strided(box.shape, steps, held.storage_offset() + moves[0].at))
        else:
            apart = localized(there, name, (0,) * len(box.shape), box.shape)
            found.append(apart.made([held[slices(*own)] for _, own in apart.boxes]))
    return found


def _view_steps(move: Move, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the strides by which a move reads all of a dense tensor along its axes, None if it has none."""
    loops, steps = {to: (count, at) for count, to, at in move.loops}, list[int]()
    for size, stride in zip(shape, dense(shape).stride, strict=True):
        # A loop that runs over several axes, with no step between, has the strides of all of them.
        over = next(((to, count, at) for to, (count, at) in loops.items() if to <= stride < to * count), None)
        if size == 1:
            steps.append(0)
        elif over is None or over[0] * over[1] < stride * size:
            return None
        else:
            steps.append(over[2] * (stride // over[0]))
    return tuple(steps)


def _merged(local: Local, shard: ShardedTensor, parts: Sequence[Any], fill: float | None = None) -> Any:
    made = local.made(parts, fill)
    if isinstance(made, LazyTensor):
        return made.reshape(shard.local_shape)
    place = next((part.device for part in parts if isinstance(part, torch.Tensor)), device_of(shard.data))
    return made.reshape(shard.local_shape).to(place)


def through_trace(tree: Any, found: Trace, *, cast: bool = False) -> Any:
    """Return a target whose tensors are made by a trace of what is stored: as factories, which a load merges.

    So each rank asks for the boxes of stored tensors that its own are made of, and for nothing else, as `explain` of
    the result shows. Tensors that the trace doesn't make stay as they are.

    Args:
        tree: a target: shards, or plain tensors, which are whole and have the keys of their paths.
        found: from stored tensors to those of the target, by key.
        cast: whether a target may have another dtype than what the trace makes.

    Raises:
        ShapeError: the trace makes a tensor of another shape or dtype than the target's; when it is loaded.
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
        return as_factory(leaf, partial(_made_form, found, cast)) if is_made else leaf

    pairs, rebuild = flatten_with_paths(tree)
    return rebuild([on_leaf(path, leaf) for path, leaf in pairs])


@dataclass(frozen=True, slots=True)
class _Targets(Sequence[Any]):
    """Ranks' targets, each seen through its trace when it is asked for: those of all may fill the memory."""

    trees: Sequence[Any]
    traces: Sequence[Trace]
    cast: bool

    def __len__(self) -> int:
        return len(self.trees)

    def __getitem__(self, rank: Any) -> Any:
        return through_trace(self.trees[rank], self.traces[rank], cast=self.cast)


def through_traces(trees: Sequence[Any], found: Trace | Sequence[Trace], *, cast: bool = False) -> Sequence[Any]:
    """Return the targets of all ranks, each through its own trace, or through one for all.

    Raises:
        MetadataError: there aren't as many traces as targets.
    """
    traces = found if isinstance(found, Sequence) else [found] * len(trees)
    if len(traces) != len(trees):
        expected, fix = f"one for each of {len(trees)} targets", "Pass one trace, or each rank's."
        refuse("transform", "traces", len(traces), expected, fix, error=MetadataError)
    return _Targets(trees, traces, cast)


def _made_form(found: Trace, cast: bool, shard: ShardedTensor) -> StoredForm:
    """Return the boxes that a box of a target is made of, without data, since it is only loaded."""
    doing = "transform"
    check_box(doing, shard)
    check_written(found, shard.key, doing)
    kind, target = found.outputs[shard.key], Kind(shard.global_shape, shard.dtype)
    if kind.shape != target.shape or (kind.dtype is not target.dtype and not cast):
        fix = "Trace the code with what is stored, and make the target of what it makes."
        what = f"{doing}: the trace makes another {shard.key!r} than the target"
        raise ShapeError(error_text(what, found=kind, expected=target, fix=fix))
    shape = (*(1,) * shard.prepend_axis_num, *shard.local_shape)
    local = localized(found, shard.key, shard.global_offset, shape)
    shards = [
        replace(
            whole_shard(name, found.sources[name]),
            local_shape=box.shape,
            global_offset=box.offset,
            axis_fragmentations=None,
            replica_id=shard.replica_id,
        )
        for name, box in local.boxes
    ]
    return StoredForm(tuple(shards), lambda parts: _merged(local, shard, parts).to(shard.dtype))

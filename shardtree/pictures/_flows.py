"""Pictures of lenses, factories and traces: flows from rows of tensors on the left to rows of tensors on the right.

Rows are indices along one axis, drawn downwards. A run is a range of rows that are consecutive on both sides.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.geometry import Column
from ..core.lazy import dense
from ..core.mapping import ShardedTensor, ShardedTensorFactory
from ..core.trees import shard_leaves
from ..errors import KeyMismatch, ShapeError, error_text, plural, printable, shorten
from ..lenses import Lens
from ..traces import Computed, Loop, Move, Trace, axis_of, coverage, factored
from ._picture import TONES, Block, Flow, Picture, Stream

_MOST_ELEMENTS = 1 << 22
"""Largest number of elements of a local tensor, since each element is followed to its stored index."""
_MOST_STREAMS = 64


def lens_picture(lens: Lens, shards: Sequence[ShardedTensor]) -> Picture:
    """Return the picture of a lens: where each row of the local tensors is stored.

    Args:
        lens: The lens from local to stored tensors.
        shards: Shards with or without data, one per rank, in the order of ranks.

    Raises:
        ShapeError: There is no shard, or one has more than four million elements.

    Examples:
        >>> from shardtree.lenses import gate_and_up
        >>> import torch
        >>> held = [ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2), (0, rank, 2)) for rank in range(2)]
        >>> (flow,) = lens_picture(gate_and_up(tensor_parallel=2), held).rows[0]
        >>> [stream.title for stream in flow.streams][:2]
        ['rank 0 [0:2] is w[0:2]', 'rank 0 [2:4] is w[4:6]']
    """
    if not shards:
        raise ShapeError(error_text("draw: no shard was passed with the lens", fix="Pass a shard: draw(lens, shard)."))
    names = [f"rank {rank}" if len(shards) > 1 else shards[0].key for rank in range(len(shards))]
    tensors = [
        _rank_tensor(name, shard.local_shape, _stored_by(lens, shard))
        for name, shard in zip(names, shards, strict=True)
    ]
    return _rank_picture(f"{shards[0].key!r} {shards[0].global_shape}: held and stored", tensors)


def factory_picture(factory: ShardedTensorFactory) -> Picture:
    """Return the picture of a factory: where each row of its tensor is stored.

    Raises:
        ShapeError: The factory's tensor is missing, or has more than four million elements.

    Examples:
        >>> from shardtree.lenses import as_factory, transposed
        >>> import torch
        >>> factory = as_factory(ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2)), transposed())
        >>> (flow,) = factory_picture(factory).rows[0]
        >>> [stream.title for stream in flow.streams]
        ['w [0:4] is w[:, 0:4]']
    """
    shape = getattr(factory.data, "shape", None)
    if shape is None:
        raise ShapeError(
            error_text(f"draw: the factory of {factory.key!r} has no tensor", fix="Give it data on the meta device.")
        )

    def build(numbers: torch.Tensor) -> list[ShardedTensor]:
        return [
            leaf for leaf in shard_leaves(replace(factory, data=numbers).build()) if isinstance(leaf, ShardedTensor)
        ]

    return _rank_picture(
        f"{factory.key!r} {tuple(shape)}: held and stored", [_rank_tensor(factory.key, tuple(shape), build)]
    )


def _stored_by(lens: Lens, shard: ShardedTensor) -> Callable[[torch.Tensor], Sequence[ShardedTensor]]:
    return lambda numbers: lens(replace(shard, data=numbers, dtype=numbers.dtype)).shards


@dataclass(frozen=True, slots=True, eq=False)
class _RankTensor:
    """A rank's local tensor, with the stored location of each element.

    Attributes:
        name: Name of the rank.
        shape: Shape of the local tensor.
        shards: The shards that the lens stores.
        shard: Index into `shards` for each element, -1 for an element that isn't stored, int64 (elements,).
        place: Index of each element in its stored tensor, padded on the left with zeros, int64 (elements, axes).
    """

    name: str
    shape: tuple[int, ...]
    shards: Sequence[ShardedTensor]
    shard: Column
    place: Column


def _rank_tensor(
    name: str, shape: tuple[int, ...], build: Callable[[torch.Tensor], Sequence[ShardedTensor]]
) -> _RankTensor:
    """Return a rank's tensor with each element's stored location, found by passing numbered elements to the lens."""
    count = prod(shape)
    if count > _MOST_ELEMENTS:
        more, fix = f"{count:,} elements", f"Draw the lens or factory with at most {_MOST_ELEMENTS:,} elements."
        raise ShapeError(error_text("draw: the tensor is too large", found=more, fix=fix))
    shards = build(torch.arange(count, device="cpu").reshape(shape))
    axes = max([1, *(len(part.global_shape) for part in shards)])
    shard, place = np.full(count, -1, dtype=np.int64), np.zeros((count, axes), dtype=np.int64)
    for number, part in enumerate(shards):
        local = (1,) * part.prepend_axis_num + part.local_shape
        numbers = part.data.reshape(-1).numpy()
        held_elements = np.flatnonzero((numbers >= 0) & (numbers < count))
        where = np.stack(np.unravel_index(held_elements, local or (1,)), axis=1) + np.array(part.global_offset or (0,))
        shard[numbers[held_elements]] = number
        place[numbers[held_elements], axes - where.shape[1] :] = where
    return _RankTensor(name, shape or (1,), shards, shard, place)


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive rows of a tensor on the left that are consecutive on the right, too, or that all lack a counterpart.

    Attributes:
        block: Index of the tensor among those on the left.
        start: First row on the left.
        rows: Number of rows.
        target: Key of the tensor on the right, its axis of rows, and positions along its other axes; None if missing.
        to_start: First row on the right.
        what: For rows without a counterpart, the reason; for others, the computation in between, if any.
    """

    block: int
    start: int
    rows: int
    target: tuple[str, int, tuple[Any, ...]] | None
    to_start: int
    what: str = ""


def _rank_picture(title: str, tensors: Sequence[_RankTensor]) -> Picture:
    axes = range(min(len(each.shape) for each in tensors))
    by_axis = [[run for number, tensor in enumerate(tensors) for run in _runs(number, tensor, axis)] for axis in axes]
    # Rows lie along the axis with the most runs.
    axis = max(axes, key=lambda each: (len(by_axis[each]), -each))
    shapes = {one.key: one.global_shape for tensor in tensors for one in tensor.shards}
    blocks = [Block(tensor.name, tensor.shape[axis]) for tensor in tensors]
    what = {0: "rows", 1: "columns"}.get(axis, f"axis {axis}")
    caption = f"{what} of what is held, in runs that stay together"
    return _flow_picture(title, ("held", "stored"), blocks, by_axis[axis], shapes, caption)


def _flow_picture(
    title: str,
    headings: tuple[str, str],
    blocks: Sequence[Block],
    runs: Sequence[_Run],
    shapes: dict[str, tuple[int, ...]],
    caption: str,
) -> Picture:
    """Return the picture of flows from rows of blocks to rows of tensors.

    Args:
        title: The picture's title.
        headings: Headings above the left and the right side.
        blocks: Blocks on the left side.
        runs: Runs of the blocks' rows, each drawn as a stream.
        shapes: Shapes of the tensors on the right side, by key.
        caption: Text below the picture.
    """
    unique_targets = dict.fromkeys(run.target for run in runs if run.target is not None)
    targets = sorted(unique_targets, key=lambda target: (list(shapes).index(target[0]), target[1:]))
    number = {target: place for place, target in enumerate(targets)}
    shared = {key for key, *_ in targets if sum(each[0] == key for each in targets) > 1}
    names = [_name(target, shapes, is_one=target[0] not in shared) for target in targets]
    to_blocks = tuple(Block(name, shapes[target[0]][target[1]]) for name, target in zip(names, targets, strict=True))
    streams = tuple(_stream(run, place, blocks, number, names) for place, run in enumerate(runs[:_MOST_STREAMS]))
    left = len(runs) - _MOST_STREAMS
    notes = (f"And {plural(left, 'run')} of rows more.",) if left > 0 else ()
    flow = Flow(*headings, tuple(blocks), to_blocks, streams, caption)
    return Picture(title, ((flow,),), notes)


def _stream(
    run: _Run,
    place: int,
    blocks: Sequence[Block],
    number: dict[tuple[str, int, tuple[Any, ...]], int],
    names: Sequence[str],
) -> Stream:
    label = f"{run.start}:{run.start + run.rows}"
    row_text = _with_rows(blocks[run.block].name, label, " ")
    if run.target is None:
        return Stream(run.block, run.start, run.rows, -1, 0, "none", f"{row_text} {run.what}", f"{label} {run.what}")
    to = number[run.target]
    to_label = row_text if len(blocks) > 1 else label
    title = f"{row_text} is {_with_rows(names[to], f'{run.to_start}:{run.to_start + run.rows}')}{run.what}"
    return Stream(run.block, run.start, run.rows, to, run.to_start, f"t{place % TONES}", title, label, to_label)


def _name(target: tuple[str, int, tuple[Any, ...]], shapes: dict[str, tuple[int, ...]], *, is_one: bool) -> str:
    """Return a label for ``target = (key, axis of rows, positions along other axes)``, such as "w[0, rows]".

    Whole rows along axis 0 need no index. If `is_one` (no other target has the key), ":" replaces single positions.
    """
    key, axis, others = target
    free = iter(":" if is_one and isinstance(each, int) else str(each) for each in others)
    axes = ["rows" if each == axis else next(free) for each in range(len(shapes[key]))]
    return key if axes[0] == "rows" and set(axes[1:]) <= {":"} else f"{key}[{', '.join(axes)}]"


def _with_rows(name: str, span: str, apart: str = "") -> str:
    """Put a range of rows into a name: "w[:, rows]" gives "w[:, 0:4]"; "w" gives "w[0:4]", with `apart` before "["."""
    head, bracket, place = name.rpartition("[")
    has_place = bracket and "rows" in place.rstrip("]").split(", ")
    return printable(f"{head}[{place.replace('rows', span)}" if has_place else f"{name}{apart}[{span}]")


def _runs(number: int, tensor: _RankTensor, axis: int) -> Iterator[_Run]:
    """Yield the runs along an axis of the tensor with the index `number`; a row is located by its first element."""
    if not prod(tensor.shape):
        return
    stride = prod(tensor.shape[axis + 1 :])
    first = np.arange(tensor.shape[axis]) * stride
    shard, place = tensor.shard[first], tensor.place[first]
    step = np.diff(place, axis=0)
    distance = np.abs(step).sum(axis=1)
    # Rows stay together where exactly one coordinate grows by one, in the same tensor.
    along = np.where((distance == 1) & (step.max(axis=1, initial=0) == 1), step.argmax(axis=1), -1)
    together = (shard[1:] == shard[:-1]) & ((along >= 0) | (shard[1:] < 0))
    together[1:] &= (along[1:] == along[:-1]) | (shard[2:] < 0) | ~together[:-1]
    starts = [0, *(np.flatnonzero(~together) + 1).tolist(), len(first)]
    for low, high in itertools.pairwise(starts):
        if shard[low] < 0:
            yield _Run(number, low, high - low, None, 0, "is not stored")
            continue
        part = tensor.shards[int(shard[low])]
        where = place[low, place.shape[1] - max(len(part.global_shape), 1) :].tolist()
        run_axis = min(axis, len(where) - 1)
        if high - low > 1:
            run_axis = max(int(along[low]) - (place.shape[1] - len(where)), 0)
        others = tuple(where[:run_axis] + where[run_axis + 1 :])
        yield _Run(number, low, high - low, (part.key, run_axis, others), where[run_axis])


_MOST_RUNS = 256
"""Largest number of runs that are drawn for one move."""


class _Span(NamedTuple):
    """A range of indices along an axis of length `size`."""

    low: int
    high: int
    size: int

    def __str__(self) -> str:
        if (self.low, self.high) == (0, self.size):
            return ":"
        return str(self.low) if self.high == self.low + 1 else f"{self.low}:{self.high}"


def trace_picture(trace: Trace, of: str | None = None) -> Picture:
    """Return the picture of a trace: the source rows of each output's rows.

    Args:
        trace: The trace to draw.
        of: Name of the only output to draw; None for all outputs.

    Raises:
        KeyMismatch: The trace has no such output.

    Examples:
        >>> import torch, shardtree as st
        >>> sources = {"k": torch.empty(2), "v": torch.empty(2)}
        >>> fused = st.trace(lambda given: {"kv": torch.cat([given["k"], given["v"]])}, sources)
        >>> (flow,) = trace_picture(fused).rows[0]
        >>> [stream.title for stream in flow.streams]
        ['kv [0:2] is k[0:2]', 'kv [2:4] is v[0:2]']
    """
    if of is not None and of not in trace.outputs:
        fix = f"Pass one of trace.outputs: {', '.join(shorten(map(repr, trace.outputs), shown=3))}."
        raise KeyMismatch(error_text(f"draw: the trace has no output {of!r}", fix=fix))
    numbers, runs = dict[tuple[str, int, tuple[_Span, ...]], int](), list[_Run]()
    names = [of] if of is not None else [name for name in trace.outputs if name not in trace.tied]
    count = 0
    for name in names:
        if len(runs) >= _MOST_STREAMS:
            break
        axis, rows = _along_best_axis(trace, name)
        for others, run in rows:
            runs.append(replace(run, block=numbers.setdefault((name, axis, others), len(numbers))))
        count += 1
    counts = [plural(len(trace.sources), "source"), plural(len(trace.outputs), "output")]
    title = ", ".join(counts) if of is None else f"{of!r}: {trace.outputs[of]}"
    blocks = [
        Block(_output_name(name, axis, others), (trace.outputs[name].shape or (1,))[axis])
        for name, axis, others in numbers
    ]
    shapes = {name: kind.shape or (1,) for name, kind in trace.sources.items()}
    caption = "rows of what is made, in runs that stay together"
    picture = _flow_picture(title, ("made", "given"), blocks, runs, shapes, caption)
    more = (f"And {plural(len(names) - count, 'output')} more: draw(trace, name) draws one.",)
    return replace(picture, notes=(*picture.notes, *(more if count < len(names) else ())))


def _output_name(name: str, axis: int, others: tuple[_Span, ...]) -> str:
    axes = [*map(str, others[:axis]), "rows", *map(str, others[axis:])]
    return name if not axis and set(axes[1:]) <= {":"} else f"{name}[{', '.join(axes)}]"


_Row = tuple[tuple[_Span, ...], _Run]
"""A run of an output's rows, and its position along the output's other axes."""


def _along_best_axis(trace: Trace, name: str) -> tuple[int, list[_Row]]:
    """Return the axis along which an output is cut into the longest runs on average, and the runs along this axis."""
    moves, shape = trace.moves[name], trace.outputs[name].shape or (1,)
    missing = coverage(moves, prod(shape))[0] if moves.numel < prod(shape) else []
    parts = [(move, shape, "is never written") for move in missing]
    for move in moves:
        for part, what in _from_sources(move):
            root = trace.sources[part.root].shape if isinstance(part.root, str) else (part.last + 1,)
            parts.append((part, root or (1,), what))
    by_axis = [
        [
            row
            for move, root, what in parts
            for row in itertools.islice(_rows(move, shape, root, axis, what), _MOST_RUNS)
        ]
        for axis in range(len(shape))
    ]
    cut = [axis for axis, rows in enumerate(by_axis) if any(run.rows < shape[axis] for _, run in rows)]
    lengths = {axis: sum(run.rows for _, run in by_axis[axis]) / len(by_axis[axis]) for axis in cut}
    axis = max(cut, key=lambda each: (lengths[each], -each), default=0)
    return axis, sorted(by_axis[axis], key=lambda row: (row[0], row[1].start))


def _from_sources(move: Move, through: str = "") -> Iterator[tuple[Move, str]]:
    """Yield the moves at the origin of a move, traced back through computations, each with the computations' text."""
    # `through` is the text of the computations after this move. Only one operand is followed.
    what = "".join(f".{step}" for step in move.via) + through
    operation = move.root if isinstance(move.root, Computed) else None
    operand = next((each for each in operation.tensors if not each.alone), None) if operation else None
    if operand is not None:
        for part in operand.moves.find([move._replace(root=None, via=())])[0]:
            yield from _from_sources(part, f" in {operation}{what}")
    else:
        yield move, what if isinstance(move.root, str) else f"is {move.root}{what}"


def _rows(move: Move, shape: tuple[int, ...], root: tuple[int, ...], axis: int, what: str) -> Iterator[_Row]:
    """Yield a move's runs of rows along an axis, from the shapes of output and source, and text for `_Run.what`."""
    into, there = dense(shape).stride, dense(root).stride
    loops = factored(move, shape, root)
    along = [loop for loop in loops if axis_of(loop[1], shape) == axis]
    other_loops = [loop for loop in loops if axis_of(loop[1], shape) != axis]
    is_source = isinstance(move.root, str)
    root_axis, rows = min(axis, len(root) - 1), 1
    if along and along[-1][1] == into[axis]:
        last = axis_of(along[-1][2], root)
        # All rows of a constant, or of unwritten elements, are alike.
        if not is_source or (last < len(root) and along[-1][2] == there[last]):
            root_axis, rows = min(last, len(root) - 1), along.pop()[0]
    for to, at in _places(move.to, move.at, along):
        to_spans = _spans(to, [(count, step) for count, step, _ in other_loops], shape)
        from_spans = _spans(at, [(count, step) for count, _, step in other_loops], root)
        target = (move.root, root_axis, (*from_spans[:root_axis], *from_spans[root_axis + 1 :])) if is_source else None
        start = to_spans[axis].low
        run = _Run(0, start, min(rows, shape[axis] - start), target, from_spans[root_axis].low, what)
        yield (*to_spans[:axis], *to_spans[axis + 1 :]), run


def _places(to: int, at: int, loops: Sequence[Loop]) -> Iterator[tuple[int, int]]:
    for indices in itertools.product(*(range(count) for count, _, _ in loops)):
        pairs = list(zip(indices, loops, strict=True))
        yield to + sum(i * step for i, (_, step, _) in pairs), at + sum(i * step for i, (_, _, step) in pairs)


def _spans(place: int, loops: Sequence[tuple[int, int]], shape: tuple[int, ...]) -> list[_Span]:
    """Return the range of indices along each axis that (count, stride) loops cover from a row-major position."""
    spans = []
    for axis, (stride, size) in enumerate(zip(dense(shape).stride, shape, strict=True)):
        low = place // stride % size if size else 0
        more = sum((count - 1) * (step // stride) for count, step in loops if axis_of(step, shape) == axis)
        spans.append(_Span(low, min(size, low + more + 1), size))
    return spans

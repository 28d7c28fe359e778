"""Pictures of traces: which rows of outputs are which rows of sources."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from ..errors import KeyMismatch, error_text, plural, shorten
from ..lazy import dense
from ..traces import Computed, Loop, Move, Trace, axis_of, coverage, factored
from ._lenses import MOST_STREAMS, Run, flow_picture
from ._picture import Block, Picture

_MOST_RUNS = 256
"""Of a move: more aren't drawn."""


class _Span(NamedTuple):
    """Places along an axis."""

    low: int
    high: int
    size: int

    def __str__(self) -> str:
        if (self.low, self.high) == (0, self.size):
            return ":"
        return str(self.low) if self.high == self.low + 1 else f"{self.low}:{self.high}"


def trace_picture(trace: Trace, of: str | None = None) -> Picture:
    """Return the picture of which rows of outputs are which rows of sources, along the axis that is cut most.

    Args:
        trace: what is drawn.
        of: the one output that is; None for all.

    Raises:
        KeyMismatch: there is no such output.

    Examples:
        >>> import torch, shardtree as st
        >>> sources = {"k": torch.empty(2), "v": torch.empty(2)}
        >>> fused = st.trace(lambda given: {"kv": torch.cat([given["k"], given["v"]])}, sources)
        >>> (flow,) = trace_picture(fused).rows[0]
        >>> [stream.title for stream in flow.streams]
        ['kv [0:2] is k[0:2]', 'kv [2:4] is v[0:2]']
    """
    if of is not None and of not in trace.outputs:
        fix = f"trace.outputs has them all: {', '.join(shorten(map(repr, trace.outputs), shown=3))}."
        raise KeyMismatch(error_text(f"draw: the trace has no output {of!r}", fix=fix))
    numbers, runs = dict[tuple[str, int, tuple[_Span, ...]], int](), list[Run]()
    names = [of] if of is not None else [name for name in trace.outputs if name not in trace.tied]
    drawn = 0
    for name in names:
        if len(runs) >= MOST_STREAMS:
            break
        axis, rows = _along_best_axis(trace, name)
        for others, run in rows:
            runs.append(replace(run, held=numbers.setdefault((name, axis, others), len(numbers))))
        drawn += 1
    counts = [plural(len(trace.sources), "source"), plural(len(trace.outputs), "output")]
    title = ", ".join(counts) if of is None else f"{of!r}: {trace.outputs[of]}"
    blocks = [
        Block(_name(name, axis, others), (trace.outputs[name].shape or (1,))[axis]) for name, axis, others in numbers
    ]
    shapes = {name: kind.shape or (1,) for name, kind in trace.sources.items()}
    caption = "rows of what is made, in runs that stay together"
    picture = flow_picture(title, ("made", "given"), blocks, runs, shapes, caption)
    more = (f"And {plural(len(names) - drawn, 'output')} more: draw(trace, name) draws one.",)
    return replace(picture, notes=(*picture.notes, *(more if drawn < len(names) else ())))


def _name(name: str, axis: int, others: tuple[_Span, ...]) -> str:
    shown = [*map(str, others[:axis]), "rows", *map(str, others[axis:])]
    return name if not axis and set(shown[1:]) <= {":"} else f"{name}[{', '.join(shown)}]"


_Row = tuple[tuple[_Span, ...], Run]
"""A run of an output's rows, and where it lies along the output's other axes."""


def _along_best_axis(trace: Trace, name: str) -> tuple[int, list[_Row]]:
    """Return an output's runs of rows along one axis: of those along which it is cut, that with the longest runs."""
    moves, shape = trace.moves[name], trace.outputs[name].shape or (1,)
    missing = coverage(moves, prod(shape))[0] if moves.numel < prod(shape) else []
    parts = [(move, shape, "is never written") for move in missing]
    for move in moves:
        for part, what in _from_sources(move):
            root = trace.sources[part.root].shape if isinstance(part.root, str) else (part.last + 1,)
            parts.append((part, root or (1,), what))
    found = [
        [
            row
            for move, root, what in parts
            for row in itertools.islice(_rows(move, shape, root, axis, what), _MOST_RUNS)
        ]
        for axis in range(len(shape))
    ]
    cut = [axis for axis, rows in enumerate(found) if any(run.rows < shape[axis] for _, run in rows)]
    lengths = {axis: sum(run.rows for _, run in found[axis]) / len(found[axis]) for axis in cut}
    axis = max(cut, key=lambda each: (lengths[each], -each), default=0)
    return axis, sorted(found[axis], key=lambda row: (row[0], row[1].start))


def _from_sources(move: Move, through: str = "") -> Iterator[tuple[Move, str]]:
    """Yield a move as moves from sources, with what elements go through; of what is computed, its first operand's."""
    what = "".join(f".{step}" for step in move.via) + through
    computed = move.root if isinstance(move.root, Computed) else None
    operand = next((each for each in computed.tensors if not each.alone), None) if computed else None
    if operand is not None:
        for part in operand.moves.find([move._replace(root=None, via=())])[0]:
            yield from _from_sources(part, f" in {computed}{what}")
    else:
        yield move, what if isinstance(move.root, str) else f"is {move.root}{what}"


def _rows(move: Move, shape: tuple[int, ...], root: tuple[int, ...], axis: int, what: str) -> Iterator[_Row]:
    """Yield the runs of a move's rows along an axis of an output."""
    into, there = dense(shape).stride, dense(root).stride
    loops = factored(move, shape, root)
    along = [loop for loop in loops if axis_of(loop[1], shape) == axis]
    rest = [loop for loop in loops if axis_of(loop[1], shape) != axis]
    is_source = isinstance(move.root, str)
    own, rows = min(axis, len(root) - 1), 1
    if along and along[-1][1] == into[axis]:
        last = axis_of(along[-1][2], root)
        # Of a constant, or nothing, all rows are alike.
        if not is_source or (last < len(root) and along[-1][2] == there[last]):
            own, rows = min(last, len(root) - 1), along.pop()[0]
    for to, at in _places(move.to, move.at, along):
        held = _spans(to, [(count, step) for count, step, _ in rest], shape)
        given = _spans(at, [(count, step) for count, _, step in rest], root)
        target = (move.root, own, (*given[:own], *given[own + 1 :])) if is_source else None
        start = held[axis].low
        run = Run(0, start, min(rows, shape[axis] - start), target, given[own].low, what)
        yield (*held[:axis], *held[axis + 1 :]), run


def _places(to: int, at: int, loops: Sequence[Loop]) -> Iterator[tuple[int, int]]:
    for indices in itertools.product(*(range(count) for count, _, _ in loops)):
        pairs = list(zip(indices, loops, strict=True))
        yield to + sum(i * step for i, (_, step, _) in pairs), at + sum(i * step for i, (_, _, step) in pairs)


def _spans(place: int, loops: Sequence[tuple[int, int]], shape: tuple[int, ...]) -> list[_Span]:
    """Return where elements from a place on, by loops, lie along each axis."""
    found = []
    for axis, (stride, size) in enumerate(zip(dense(shape).stride, shape, strict=True)):
        low = place // stride % size if size else 0
        more = sum((count - 1) * (step // stride) for count, step in loops if axis_of(step, shape) == axis)
        found.append(_Span(low, min(size, low + more + 1), size))
    return found

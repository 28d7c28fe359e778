"""Local traces: each makes a box of an output from boxes of sources, read from files, lazy tensors or other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from ..core.codec import dtype_name
from ..core.lazy import Box, Boxwise, LazyTensor, Recipe, dense, of_source
from ..core.mapping import ShardedTensor
from ..errors import TraceError, error_text
from ._boxes import MOST, Reads, View, into_box, reads_of, tight
from ._evaluate import leaves, operand_moves
from ._moves import Move, Moves
from ._steps import Computed, Constant, Function, Kind, Operand, bits
from ._trace import Trace, check_kinds, evaluated


@dataclass(frozen=True, slots=True, eq=False)
class Local:
    """A trace that makes one output, or one box of an output, and whose sources are boxes of the original sources.

    Attributes:
        boxes: Boxes that the output needs, as pairs (name of the original source, box).
        trace: Trace from the boxes to the output; its sources are named by the boxes' indices.
        views: For each box, the strided view of the output that gets its elements, or None if the box must be copied.
    """

    boxes: tuple[tuple[str, Box], ...]
    trace: Trace
    views: tuple[View | None, ...]

    def output(self, parts: Sequence[Any], fill: float | None = None) -> Any:
        """Return the output, computed from tensors with the boxes' elements; lazy if any of these tensors is lazy.

        Args:
            parts: Tensor or lazy tensor for each box, in the order of `boxes`.
            fill: Value of elements that are never written.
        """
        [name] = self.trace.outputs
        tensors = {str(number): part for number, part in enumerate(parts)}
        if any(isinstance(part, LazyTensor) for part in parts):
            return _lazy_output(self.trace, name, tensors, fill)
        return evaluated(self.trace, tensors, fill)[name]


def localized(
    trace: Trace,
    name: str,
    offset: Sequence[int],
    shape: Sequence[int],
    most: int = MOST,
    *,
    keep_views: bool | None = None,
) -> Local:
    """Return the trace that makes a box of one output from the boxes of sources that it reads.

    Adjacent boxes of a source are joined.

    Args:
        trace: Trace of all outputs.
        name: Name of the output.
        offset: Offset of the box.
        shape: Shape of the box.
        most: Approximate upper bound of the number of boxes for each move. A move that would need more gets larger
            boxes, which also contain elements that it does not read.
        keep_views: Whether two boxes that both have a strided view in the output (`Local.views`) are joined only if the
            joined box has one, too; None if no views are needed.
    """
    part = trace.narrow({name: (offset, shape)})
    reads = reads_of(part.sources, part.moves[name], most, keep_views=keep_views)
    boxes = tuple((root, box) for root, parts in reads.boxes.items() for box in parts)
    numbers = {place: number for number, place in enumerate(boxes)}
    sources = {str(number): Kind(box.shape, trace.sources[root].dtype) for number, (root, box) in enumerate(boxes)}
    moves = Moves(_from_boxes(part.moves[name], part, reads, numbers, most))
    views = tuple(view for views_of_source in reads.views.values() for view in views_of_source)
    return Local(boxes, Trace(sources, part.outputs, {name: moves}), views)


def _from_boxes(
    moves: Sequence[Move], part: Trace, reads: Reads, numbers: Mapping[tuple[str, Box], int], most: int
) -> Iterator[Move]:
    """Yield moves that do the same as the given ones, but read boxes of the sources instead of whole sources.

    Args:
        moves: Moves from whole sources.
        part: Trace to which the moves belong.
        reads: Boxes that the moves read.
        numbers: Number of each box, by (source's name, box); it becomes the name of the box as a source.
        most: Approximate upper bound of the number of boxes for each move; the value with which `reads` was computed.
    """
    for move in moves:
        if isinstance(move.root, str):
            for box, piece in tight(move, part.sources[move.root].shape, most):
                outer = reads.boxes[move.root][reads.numbers[move.root][box]]
                yield into_box(piece, part.sources[move.root].shape, outer, str(numbers[move.root, outer]))
        elif isinstance(move.root, Computed):
            operands = tuple(
                replace(operand, moves=Moves(_from_boxes(operand_moves(operand, move), part, reads, numbers, most)))
                if isinstance(operand, Operand)
                else operand
                for operand in move.root.operands
            )
            size = move.size
            loops = tuple((n, to, step) for (n, to, _), step in zip(move.loops, dense(size).stride, strict=True))
            yield Move(replace(move.root, operands=operands), move.to, 0, loops, move.via)
        else:
            yield move


def _lazy_output(trace: Trace, name: str, lazies: Mapping[str, LazyTensor], fill: float | None = None) -> LazyTensor:
    """Return the lazy tensor of an output of a trace.

    Args:
        trace: Trace that has the output.
        name: Name of the output.
        lazies: Lazy sources of the output, by name.
        fill: Value of elements that are never written.
    """

    def recipe(box: Box) -> Recipe:
        local = localized(trace, name, *box)
        needs = [(lazies[root], place) for root, place in local.boxes]
        return needs, lambda parts: local.output(list(parts), fill)

    def identify() -> tuple[Any, ...]:
        names = sorted(lazies)
        return "trace", _description(trace.moves[name]), fill, names, *(lazies[source] for source in names)

    kind = trace.outputs[name]
    return of_source(Boxwise(name, kind.shape, kind.dtype, recipe, identify))


def _description(value: Any) -> Any:
    """Return nested lists of numbers and texts that identify moves, or the part of a move that `value` is."""
    if isinstance(value, Moves | tuple | list):
        return [_description(each) for each in value]
    if isinstance(value, Constant):
        return [dtype_name(value.value.dtype), [*value.value.shape], sha256(bits(value.value).numpy()).hexdigest()]
    if isinstance(value, Function | Computed | Operand):
        return [_description(getattr(value, name)) for name in value.__slots__]
    return value if isinstance(value, str | int) else str(value.name()) if hasattr(value, "name") else repr(value)


def transformed(trace: Trace, tree: Mapping[str, Any], doing: str) -> dict[str, Any]:
    """Return a trace's outputs as lazy shards, computed from the tensors of a flat tree, and the tree's objects.

    Args:
        trace: Trace whose sources are tensors of the tree, by key.
        tree: Whole shards with lazy data, by key, and objects, by unique key.
        doing: Name of the operation, for messages.

    Raises:
        KeyMismatch: a source is missing.
        ShapeError: a source has another shape or dtype than was traced.
        TraceError: elements of an output are never written.
    """
    sources_of = {name: check_written(trace, name, doing) for name in trace.outputs}
    sources = dict.fromkeys(name for names in sources_of.values() for name in names)
    check_kinds(doing, {name: trace.sources[name] for name in sources}, tree)
    outputs = {
        name: replace(
            whole_shard(name, kind),
            data=_lazy_output(trace, name, {source: tree[source].data for source in sources_of[name]}),
        )
        for name, kind in trace.outputs.items()
    }
    return outputs | {key: leaf for key, leaf in tree.items() if not isinstance(leaf, ShardedTensor)}


def whole_shard(key: str, kind: Kind) -> ShardedTensor:
    """Return a shard, without data, that covers a whole tensor."""
    zeros, ones = (0,) * len(kind.shape), (1,) * len(kind.shape)
    return ShardedTensor(key, None, kind.dtype, kind.shape, kind.shape, zeros, ones)


def check_written(trace: Trace, name: str, doing: str) -> tuple[str, ...]:
    """Return the names of the sources of an output, after checking that all of its elements are written.

    Raises:
        TraceError: elements are never written.
    """
    moves = trace.moves[name]
    if missing := trace.outputs[name].numel - moves.numel:
        fix = "Let the traced code write the whole output; trace.check() names the elements that are not written."
        raise TraceError(error_text(f"{doing}: {missing} elements of {name!r} are never written", fix=fix))
    return tuple(dict.fromkeys(move.root for move in leaves(moves)))

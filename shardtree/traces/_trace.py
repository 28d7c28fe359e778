"""Trace: a map from sources' elements to outputs' elements, which can be evaluated, composed, inverted and compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..core.deferred import leaf
from ..core.lazy import Box, dense
from ..core.trees import empty_data
from ..errors import KeyMismatch, ShapeError, TraceError, error_text
from ._boxes import reads_of
from ._differences import Difference, differences
from ._evaluate import dense_tensor, filled, leaves
from ._fields import Fields
from ._moves import Move, Moves, read_of, rolled, turned
from ._problems import Problem, problems_of
from ._steps import Computed, Constant, Kind, Operand, kind_of, undone
from ._text import trace_text

Place = tuple[Sequence[int], Sequence[int]]
"""A box as (offset, shape)."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Trace(Fields):
    """A map from elements of sources to elements of outputs, with the casts and functions that they pass through.

    A trace is immutable: its methods return new ones. `==` compares exactly which elements the outputs get, by whatever
    operations they were made, and `print` shows the moves. `shardtree.trace` returns one.

    Attributes:
        sources: Shape and dtype of each tensor that the code got.
        outputs: Shape and dtype of each tensor that the code returned or filled.
        moves: Moves into each output; no two of them write the same element.
        tied: For each output that is the same view of the same memory as an earlier output, the earlier output's name.
        overwritten: Moves that mark, for each output, the elements that were written and later overwritten.
    """

    def __call__(self, tensors: Mapping[str, torch.Tensor], *, fill: float | None = None) -> dict[str, torch.Tensor]:
        """Return the outputs for given sources: new dense tensors on the sources' device; tied outputs are one tensor.

        Args:
            tensors: Sources by name; those that no output needs may be omitted.
            fill: Value of elements that are never written.

        Raises:
            KeyMismatch: a source is missing.
            ShapeError: a source has another shape or dtype than was traced.
            TraceError: elements are never written, and `fill` isn't given.

        Examples:
            >>> import shardtree as st
            >>> halves = st.trace(lambda given: dict(zip("ab", given["w"].chunk(2))), {"w": torch.empty(4, 1)})
            >>> halves({"w": torch.arange(4.0).view(4, 1)})["b"]
            tensor([[2.],
                    [3.]])
        """
        roots = dict.fromkeys(move.root for moves in self.moves.values() for move in leaves(moves))
        check_kinds("trace", {name: self.sources[name] for name in roots}, tensors)
        return evaluated(self, {name: tensors[name] for name in roots}, fill)

    def narrow(self, boxes: Mapping[str, Place]) -> Trace:
        """Return the trace whose outputs are boxes of this trace's outputs, such as one rank's parts.

        Outputs without a box are left out.

        Args:
            boxes: Boxes as (offset, shape), by the outputs' names.

        Raises:
            KeyMismatch: there is no output of that name.
            ShapeError: a box reaches outside its output.

        Examples:
            >>> import shardtree as st
            >>> rows = st.trace(lambda given: {"w": given["w"].T}, {"w": torch.empty(4, 6)})
            >>> rows.narrow({"w": ((2, 0), (3, 4))}).reads()
            {'w': (Box(offset=(0, 2), shape=(4, 3)),)}
        """
        if unknown := [repr(name) for name in boxes if name not in self.outputs]:
            raise KeyMismatch(
                error_text("narrow: unknown outputs", offenders=unknown, fix="Use names that trace.outputs has.")
            )
        places = {name: Box(tuple(offset), tuple(shape)) for name, (offset, shape) in boxes.items()}
        outside = [
            f"{name!r}: shape {box.shape} at offset {box.offset} of an output of shape {self.outputs[name].shape}"
            for name, box in places.items()
            if not _lies_within(box, self.outputs[name].shape)
        ]
        if outside:
            fix = "Pass boxes that lie within the shapes in trace.outputs."
            raise ShapeError(error_text("narrow: boxes extend beyond their outputs", offenders=outside, fix=fix))
        kinds = {name: replace(self.outputs[name], shape=box.shape) for name, box in places.items()}
        moves = {name: Moves(self._at(self.moves[name], name, box)) for name, box in places.items()}
        tied = {name: main for name, main in self.tied.items() if main in places and places.get(name) == places[main]}
        losses = {
            name: Moves(self._at(self.overwritten[name], name, places[name]))
            for name in places
            if name in self.overwritten
        }
        return Trace(self.sources, kinds, moves, tied, {name: lost for name, lost in losses.items() if len(lost)})

    def _at(self, moves: Moves, name: str, box: Box) -> list[Move]:
        steps = dense(self.outputs[name].shape).stride
        place = sum(low * step for low, step in zip(box.offset, steps, strict=True))
        return moves.find([read_of(place, box.shape, dense(box.shape).stride, steps)])[0]

    def reads(self) -> dict[str, tuple[Box, ...]]:
        """Return the boxes of each source that the outputs read, by the source's name.

        The boxes contain only elements that are read, unless a move would need more than some thousand boxes.
        """
        untied = (move for name, moves in self.moves.items() if name not in self.tied for move in moves)
        return dict(reads_of(self.sources, untied).boxes)

    def stored_target(self, target: Any, /, *, cast: bool = False, plain: Sequence[str] = ()) -> Any:
        """Return `target` with factories that compute its tensors from the trace's sources; see `lenses.through_trace`.

        Args:
            target: Target of a load: shards and plain tensors. A plain tensor is whole, and its path is its key.
            cast: Whether the target's dtypes may differ from those of the outputs.
            plain: Patterns of keys of values that need no scales, as for `load`.

        Examples:
            >>> import shardtree as st
            >>> halves = st.trace(lambda given: dict(zip("ab", given["w"].chunk(2))), {"w": torch.empty(4, 1)})
            >>> st.apply_factories(halves.stored_target({"b": torch.empty(2, 1)}))["b"]["0"].key
            'w'
        """
        # Lenses are built on traces, so this module can't import them.
        return leaf("through_trace")(target, self, cast=cast, plain=plain)

    def then(self, other: Trace) -> Trace:
        """Return the composition: this trace, then `other`, whose sources are this trace's outputs.

        Raises:
            KeyMismatch: a source of the other trace isn't an output of this one.
            ShapeError: an output has another shape or dtype than that source.
        """
        check_kinds("then", other.sources, self.outputs)
        # Moves are rolled again, since parts that the other trace cuts apart may be contiguous in the sources.
        moves = {name: Moves(rolled(self._before(moves))) for name, moves in other.moves.items()}
        return Trace(self.sources, other.outputs, moves, other.tied, {})

    def _before(self, moves: Sequence[Move]) -> Iterator[Move]:
        """Yield equivalents of moves that read this trace's outputs: moves that read its sources instead."""
        for move in moves:
            if isinstance(move.root, str):
                yield from self.moves[move.root].find([move])[0]
            elif isinstance(move.root, Computed):
                operands = tuple(
                    replace(operand, moves=Moves(self._before(operand.moves)))
                    if isinstance(operand, Operand)
                    else operand
                    for operand in move.root.operands
                )
                yield move._replace(root=replace(move.root, operands=operands))
            else:
                yield move

    def inverse(self, drop: bool = False) -> Trace:
        """Return the inverse trace, from the outputs to the sources.

        It doesn't read constants, such as rows of padding, and reads only one of several tied outputs.

        Args:
            drop: Whether elements without a partner on the other side are left out: elements of sources that no output
                has, which the inverse doesn't write, and elements of outputs that were never written.

        Raises:
            TraceError: elements are dropped, repeated, unwritten, rounded or computed; the error names all of them.

        Examples:
            >>> import shardtree as st
            >>> sources = {"a": torch.empty(2), "b": torch.empty(2)}
            >>> there = st.trace(lambda given: {"both": torch.cat([given["a"], given["b"]])}, sources)
            >>> there.inverse()({"both": torch.arange(4.0)})["b"]
            tensor([2., 3.])
            >>> there.inverse().inverse() == there
            True
        """
        problems = [
            problem
            for problem in self.check()
            if problem.kind in ("repeated", *(() if drop else ("unused", "unwritten")))
        ]
        offenders = list(map(str, problems))
        droppable = sum(problem.kind != "repeated" for problem in problems)
        back: dict[str, list[Move]] = {name: [] for name in self.sources}
        for name, moves in self.moves.items():
            for move in moves if name not in self.tied else ():
                if isinstance(move.root, Constant):
                    continue
                via = f"is computed: {move.root}" if isinstance(move.root, Computed) else undone(move.via, move.root)
                if isinstance(via, str):
                    offenders.append(f"{name!r} {via}")
                else:
                    back[move.root].append(turned(move, name, via))
        if offenders:
            # Repeated, rounded and computed elements have no inverse, even with `drop`.
            can_drop = not drop and droppable == len(offenders)
            fix = "Pass drop=True for an inverse that leaves these elements out." if can_drop else None
            heading = "inverse: the trace is not one to one"
            raise TraceError(error_text(heading, offenders=dict.fromkeys(offenders), fix=fix))
        outputs = {name: kind for name, kind in self.outputs.items() if name not in self.tied}
        return Trace(outputs, self.sources, {name: Moves(moves) for name, moves in back.items()})

    def check(self, *ranks: Trace) -> tuple[Problem, ...]:
        """Return the problems: elements that aren't used or written exactly once, and hints at likely mistakes.

        Args:
            ranks: Other ranks' traces of the same sources; an element is unused only if no rank uses it.

        Examples:
            >>> import shardtree as st
            >>> for problem in st.trace(lambda given: {"w": given["w"][1:]}, {"w": torch.empty(4, 2)}).check():
            ...     print(problem)
            'w': 2 elements reach no output: [0, 0:2]
        """
        return problems_of((self, *ranks))

    def diff(self, other: Trace) -> dict[str, tuple[Difference, ...]]:
        """Return the exact differences from another trace, by output; equal outputs are left out.

        Casts, functions and constants count, but the form of the moves doesn't. Functions are compared by name.
        """
        return differences(self, other)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace) and self.sources == other.sources and not differences(self, other)

    __hash__ = None  # type: ignore[assignment]  # equal traces may have different moves

    def __str__(self) -> str:
        return trace_text(self)

    __repr__ = __str__


def evaluated(trace: Trace, tensors: Mapping[str, torch.Tensor], fill: float | None = None) -> dict[str, torch.Tensor]:
    """Return a trace's outputs for given sources, as `Trace.__call__` does, but without checking the sources."""
    outputs: dict[str, torch.Tensor] = {}  # in order: an output comes after the one that it is tied to
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    sources = {name: dense_tensor(tensor, device) for name, tensor in tensors.items()}
    for name, kind in trace.outputs.items():
        if name in trace.tied:
            outputs[name] = outputs[trace.tied[name]]
            continue
        new = empty_data(kind.shape, kind.dtype, device)
        outputs[name] = filled(new, trace.moves[name], sources, partial(_fill, name, fill))
    return outputs


def _lies_within(box: Box, shape: tuple[int, ...]) -> bool:
    if not len(box.offset) == len(box.shape) == len(shape):
        return False
    return all(low >= 0 <= n and low + n <= size for low, n, size in zip(box.offset, box.shape, shape, strict=True))


def _fill(name: str, fill: float | None, missing: int) -> float:
    if fill is None:
        fix = "Pass fill=0.0, or another value for these elements."
        raise TraceError(error_text(f"trace: {missing} elements of {name!r} are never written", fix=fix))
    return fill


def check_kinds(doing: str, expected: Mapping[str, Kind], tensors: Mapping[str, Any]) -> None:
    """Raise unless all expected tensors are present and have the expected shapes and dtypes.

    Raises:
        KeyMismatch: a tensor is missing.
        ShapeError: a tensor has another shape or dtype.
    """
    if absent := [repr(name) for name in expected if name not in tensors]:
        fix = "Pass every source of the trace, by its name in trace.sources."
        raise KeyMismatch(error_text(f"{doing}: missing sources", offenders=absent, fix=fix))
    pairs = [(name, kind, kind_of(tensors[name])) for name, kind in expected.items()]
    if wrong := [f"{name!r}: found {actual}, traced as {kind}" for name, kind, actual in pairs if actual != kind]:
        fix = "Pass tensors as traced, or trace the code again with the shapes and dtypes found now."
        raise ShapeError(error_text(f"{doing}: sources differ from the traced ones", offenders=wrong, fix=fix))

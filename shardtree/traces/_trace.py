"""Trace: what code does to the elements of tensors, as a value that evaluates, composes, inverts and compares."""

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
    """A map from elements of sources to elements of outputs, with the functions that they go through.

    A pure value: functions of it give others, `==` compares what is done, exactly, however it was done, and `print`
    shows it. `shardtree.trace` makes one.

    Attributes:
        sources: Kind of each tensor that the code was given.
        outputs: Kind of each tensor that it made.
        moves: Moves into each output, no two of which write the same place.
        tied: Outputs that are the same view of the same memory as another one, with that one's name.
        overwritten: Moves into each output over which something else was written later.
    """

    def __call__(self, tensors: Mapping[str, torch.Tensor], *, fill: float | None = None) -> dict[str, torch.Tensor]:
        """Return the outputs, made of the sources' elements: new dense tensors on their device; tied ones are the same.

        Args:
            tensors: Tensors by name; those that no output needs may be left out.
            fill: what elements get that are never written.

        Raises:
            KeyMismatch: a source is missing.
            ShapeError: one has another shape or dtype than was traced.
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
        """Return the trace of one rank's part: what makes boxes of outputs, and nothing of the rest.

        Its evaluation is what those boxes are of the whole's.

        Args:
            boxes: Boxes of outputs, by name, each as (offset, shape).

        Raises:
            KeyMismatch: there is no such output.
            ShapeError: a box leaves its output.

        Examples:
            >>> import shardtree as st
            >>> rows = st.trace(lambda given: {"w": given["w"].T}, {"w": torch.empty(4, 6)})
            >>> rows.narrow({"w": ((2, 0), (3, 4))}).reads()
            {'w': (Box(offset=(0, 2), shape=(4, 3)),)}
        """
        if unknown := [repr(name) for name in boxes if name not in self.outputs]:
            raise KeyMismatch(
                error_text("narrow: no such outputs", offenders=unknown, fix="trace.outputs has them all.")
            )
        places = {name: Box(tuple(offset), tuple(shape)) for name, (offset, shape) in boxes.items()}
        outside = [
            f"{name!r}: {box.shape} at {box.offset} of {self.outputs[name].shape}"
            for name, box in places.items()
            if not _lies_within(box, self.outputs[name].shape)
        ]
        if outside:
            raise ShapeError(error_text("narrow: boxes that leave their outputs", offenders=outside))
        kinds = {name: replace(self.outputs[name], shape=box.shape) for name, box in places.items()}
        moves = {name: Moves(self._at(self.moves[name], name, box)) for name, box in places.items()}
        tied = {name: one for name, one in self.tied.items() if one in places and places.get(name) == places[one]}
        losses = {
            name: Moves(self._at(self.overwritten[name], name, places[name]))
            for name in places
            if name in self.overwritten
        }
        return Trace(self.sources, kinds, moves, tied, {name: each for name, each in losses.items() if len(each)})

    def _at(self, moves: Moves, name: str, box: Box) -> list[Move]:
        steps = dense(self.outputs[name].shape).stride
        place = sum(low * step for low, step in zip(box.offset, steps, strict=True))
        return moves.find([read_of(place, box.shape, dense(box.shape).stride, steps)])[0]

    def reads(self) -> dict[str, tuple[Box, ...]]:
        """Return the boxes of each source that the outputs are made of, as plans and files can be asked for them.

        They hold nothing else, unless a move would be more than some thousand boxes.
        """
        own = (move for name, moves in self.moves.items() if name not in self.tied for move in moves)
        return dict(reads_of(self.sources, own).boxes)

    def stored_target(self, target: Any, /, *, cast: bool = False, plain: Sequence[str] = ()) -> Any:
        """Return the target that a load gets in place of the given one: `lenses.through_trace`.

        Args:
            target: Shards, and plain tensors, which are whole and have the keys of their paths.
            cast: Whether the target's dtypes may differ from what the trace makes.
            plain: Patterns of keys of values that need no scales, as for `load`.

        Examples:
            >>> import shardtree as st
            >>> halves = st.trace(lambda given: dict(zip("ab", given["w"].chunk(2))), {"w": torch.empty(4, 1)})
            >>> st.apply_factories(halves.stored_target({"b": torch.empty(2, 1)}))["b"]["0"].key
            'w'
        """
        # Lenses are made of traces, and not the other way round.
        return leaf("through_trace")(target, self, cast=cast, plain=plain)

    def then(self, other: Trace) -> Trace:
        """Return both, one after the other: the other's sources are this one's outputs.

        Raises:
            KeyMismatch: a source of the other isn't an output of this one.
            ShapeError: it has another shape or dtype.
        """
        check_kinds("then", other.sources, self.outputs)
        # Rolled again: what other's moves cut may run on in the sources.
        moves = {name: Moves(rolled(self._before(moves))) for name, moves in other.moves.items()}
        return Trace(self.sources, other.outputs, moves, other.tied, {})

    def _before(self, moves: Sequence[Move]) -> Iterator[Move]:
        """Yield moves from outputs of this trace as moves from its sources."""
        for move in moves:
            if isinstance(move.root, str):
                yield from self.moves[move.root].find([move])[0]
            elif isinstance(move.root, Computed):
                operands = tuple(
                    replace(each, moves=Moves(self._before(each.moves))) if isinstance(each, Operand) else each
                    for each in move.root.operands
                )
                yield move._replace(root=replace(move.root, operands=operands))
            else:
                yield move

    def inverse(self, drop: bool = False) -> Trace:
        """Return the way back, from the outputs to the sources.

        Constants, as rows of padding, are left behind, and of tied outputs one is used.

        Args:
            drop: whether what has no partner on the other side is left out: elements of sources that no output has,
                which the way back doesn't write, and elements of outputs that were never written.

        Raises:
            TraceError: elements are dropped, repeated, unwritten, rounded or computed; names all of them.

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
            each for each in self.check() if each.kind in ("repeated", *(() if drop else ("unused", "unwritten")))
        ]
        offenders = list(map(str, problems))
        droppable = sum(each.kind != "repeated" for each in problems)
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
            # What is repeated, rounded or computed has no way back, with or without it.
            can_drop = not drop and droppable == len(offenders)
            fix = "With drop=True there is a way back that doesn't write these elements." if can_drop else None
            what = "inverse: the trace isn't one to one"
            raise TraceError(error_text(what, offenders=dict.fromkeys(offenders), fix=fix))
        outputs = {name: kind for name, kind in self.outputs.items() if name not in self.tied}
        return Trace(outputs, self.sources, {name: Moves(moves) for name, moves in back.items()})

    def check(self, *ranks: Trace) -> tuple[Problem, ...]:
        """Return elements that aren't used or made exactly once, and hints at likely mistakes; nothing if all is well.

        Args:
            ranks: the other ranks' traces of the same sources: an element is unused if none of them uses it.

        Examples:
            >>> import shardtree as st
            >>> for problem in st.trace(lambda given: {"w": given["w"][1:]}, {"w": torch.empty(4, 2)}).check():
            ...     print(problem)
            'w': 2 elements reach no output: [0, 0:2]
        """
        return problems_of((self, *ranks))

    def diff(self, other: Trace) -> dict[str, tuple[Difference, ...]]:
        """Return by output what the two make of other elements; nothing where they are equal, which is exact.

        Casts, functions and constants count, and how the moves are written doesn't. Functions are compared by name.
        """
        return differences(self, other)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace) and self.sources == other.sources and not differences(self, other)

    __hash__ = None  # type: ignore[assignment]  # no form of the moves is the one of their meaning

    def __str__(self) -> str:
        return trace_text(self)

    __repr__ = __str__


def evaluated(trace: Trace, tensors: Mapping[str, torch.Tensor], fill: float | None = None) -> dict[str, torch.Tensor]:
    """Return a trace's outputs, given its sources, which aren't checked."""
    outputs: dict[str, torch.Tensor] = {}  # in order: what an output is tied to comes before it
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
        fix = "Pass fill=0.0, or another value that they get."
        raise TraceError(error_text(f"trace: {missing} elements of {name!r} are never written", fix=fix))
    return fill


def check_kinds(doing: str, expected: Mapping[str, Kind], tensors: Mapping[str, Any]) -> None:
    """Raise unless tensors are there, of the kinds that were traced.

    Raises:
        KeyMismatch: one isn't.
        ShapeError: one is of another kind.
    """
    if absent := [repr(name) for name in expected if name not in tensors]:
        fix = "Pass every source that was traced, by its name then."
        raise KeyMismatch(error_text(f"{doing}: sources that aren't there", offenders=absent, fix=fix))
    pairs = [(name, kind, kind_of(tensors[name])) for name, kind in expected.items()]
    if wrong := [f"{name!r}: found {actual}, traced as {kind}" for name, kind, actual in pairs if actual != kind]:
        fix = "Trace the code with tensors of these shapes and dtypes."
        raise ShapeError(error_text(f"{doing}: sources of another kind", offenders=wrong, fix=fix))

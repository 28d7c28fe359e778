"""`MemoryCell`, the record of one storage while traced code runs: origins of its elements, and overwritten elements.

A move (`Move`) is a strided copy into the flat storage. It reads a root: a source, a constant or a computed tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ..core.lazy import as_integers
from ._arguments import is_ordinary
from ._evaluate import filled, operand_moves
from ._moves import Move, Moves, Written, in_place, turned
from ._steps import Computed, Constant, Kind, bits

MOST_KNOWN = 1 << 26
"""Upper bound of the elements of constants that operations are computed on, unless all elements are equal."""


class MemoryCell:
    """The record of a storage's elements while traced code runs.

    The storage belongs to tracers alone, or to an ordinary tensor (see `is_ordinary`), such as a parameter.

    Attributes:
        numel: Number of elements of the storage.
        dtype: Dtype in which elements are counted; at first that of the first tensor that used the storage.
        writes: Moves that have written the present elements.
        overwritten: Moves of lost elements: a later write replaced them by elements that are neither copies of them nor
            computed from them. Moves from constants are left out.
        used: Moves that read present elements, such as those of views that were copied.
        keep: Ordinary tensor's storage, a torch object; None for a storage of tracers.
        before: Constant with the elements of an ordinary tensor at the time when its record began; None for others.
        is_ahead: Whether there are writes that an ordinary tensor's memory lacks, so that it must not be read.
        versions: Triples (tensor, version, changes) for ordinary tensors: torch's version counter when an operation was
            recorded, and the number by which this operation increases it.
    """

    __slots__ = ("before", "dtype", "is_ahead", "keep", "numel", "overwritten", "used", "versions", "writes")

    def __init__(self, numel: int, dtype: torch.dtype, writes: Iterable[Move] = (), keep: Any = None) -> None:
        self.numel, self.dtype, self.writes, self.keep = numel, dtype, Written(writes), keep
        self.overwritten: list[Move] = []
        self.used: list[Move] = []
        self.before: Constant | None = None
        self.is_ahead = False
        self.versions: list[tuple[torch.Tensor, int, int]] = []

    def note_overwritten(self, old: Iterable[Move], holes: Sequence[Move], moves: Iterable[Move]) -> None:
        """Add to `overwritten` the old elements that a write loses.

        Args:
            old: Moves of the old elements, which are no longer in `writes`.
            holes: Flat indices that are written, encoded as moves from each index to itself.
            moves: Moves of the new elements to these indices.
        """
        lost = [move for move in old if not isinstance(move.root, Constant)]
        self.overwritten += _without_kept(lost, self.used, moves) if lost and self.used else lost
        if self.used:
            self.used = Moves(holes).find(self.used)[1]

    def note(self, tensor: torch.Tensor, changes: int = 0) -> None:
        """Note an ordinary tensor's version counter in `versions`.

        Args:
            tensor: Tensor that uses the storage.
            changes: Number by which the operation that is being recorded increases the counter.
        """
        if self.keep is not None and not tensor.is_inference():  # those have no counter
            self.versions.append((tensor, tensor._version, changes))

    def was_changed(self) -> bool:
        """Return whether the version counter of an ordinary tensor has increased by more than the noted changes."""
        known: dict[int, tuple[int, int]] = {}  # by counter now: lowest one before, and changes
        for tensor, before, changes in self.versions:
            # A parameter whose data were replaced no longer has this memory.
            if is_ordinary(tensor) and tensor.untyped_storage()._cdata == self.keep._cdata:
                lowest, more = known.get(tensor._version, (before, 0))
                known[tensor._version] = min(lowest, before), more + changes
        return any(count - lowest > changes for count, (lowest, changes) in known.items())


def constant_move(elements: torch.Tensor) -> Move:
    """Return the move that copies a flat tensor from a new `Constant`, which stores one element if all are equal."""
    count = elements.numel()
    values = as_integers(elements)  # by bits: 0.0 isn't -0.0
    rows = values if elements.itemsize < 16 else bits(elements).reshape(count, -1)
    is_one = count > 1 and torch.equal(rows[1:], rows[:-1])
    loops = ((count, 1, 0 if is_one else 1),) if count > 1 else ()
    return Move(Constant((elements[:1] if is_one else elements).clone()), 0, 0, loops)


def constant_of(moves: Moves, kind: Kind) -> torch.Tensor | None:
    """Return a dense tensor whose elements all come from constants; None if some are unwritten or come from elsewhere.

    A tensor of more than `MOST_KNOWN` elements must also consist of one repeated element; otherwise None.

    Args:
        moves: Moves into the flat tensor.
        kind: Shape and dtype of the tensor.
    """
    if moves.numel < kind.numel or not all(isinstance(move.root, Constant) for move in moves):
        return None
    is_one = len(moves) == 1 and not any(step for _, _, step in moves[0].loops)
    if not is_one and kind.numel > MOST_KNOWN:
        return None
    moves = Moves([moves[0]._replace(loops=())]) if is_one else moves
    with torch._C._DisableTorchDispatch():
        new = torch.empty(() if is_one else kind.shape, dtype=kind.dtype, device="cpu")
        return filled(new, moves, {}, lambda _: 0).expand(kind.shape)


def _without_kept(old: Sequence[Move], used: Iterable[Move], moves: Iterable[Move]) -> list[Move]:
    """Return the parts of old moves whose elements a write loses.

    An old element is kept if code has read it and a new element is a copy of it, or is computed from it.

    Args:
        old: Moves of the elements that the write replaces.
        used: Moves that read the storage before the write.
        moves: Moves of the new elements.
    """
    places, lost = Moves(map(_sources_of, used)), list[Move]()
    roots: dict[Any, list[Move]] = defaultdict(list)
    for move in _all_moves(moves):
        roots[_identity(move)].append(_sources_of(move))
    kept = {root: Moves(parts) for root, parts in roots.items()}
    for move in old:
        read, unread = places.find([in_place(move)])
        lost += unread
        parts = Moves([move]).find(map(in_place, read))[0]
        lost += kept.get(_identity(move), Moves()).find(parts)[1]
    return lost


def _identity(move: Move) -> Any:
    return move.root if isinstance(move.root, str) else id(move.root)


def _sources_of(move: Move) -> Move:
    """Return the reversed move, from the destination to the root, without loops that repeat elements of the root."""
    loops = tuple([loop for loop in move.loops if loop[2]])
    return turned(move._replace(loops=loops))


def _all_moves(moves: Iterable[Move]) -> Iterator[Move]:
    """Yield moves. If a root is a `Computed` tensor, also yield the moves of its operands' elements, recursively."""
    for move in moves:
        yield move
        for operand in move.root.tensors if isinstance(move.root, Computed) else ():
            yield from _all_moves(operand_moves(operand, move))

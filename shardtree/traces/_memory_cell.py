"""The elements of one storage while code runs: moves from sources and constants, and moves that were overwritten."""

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
    """The elements of a storage while code runs.

    Attributes:
        numel: Number of elements of the storage.
        dtype: Dtype in which elements are counted: that of the first tensor that was seen to use the storage.
        writes: Moves of the present elements.
        overwritten: Moves of sources' elements that were lost: replaced by elements that aren't computed from them.
        used: Reads of the present elements.
        keep: Storage of an ordinary tensor; None for other cells.
        before: Elements of an ordinary tensor when the run first met it.
        is_ahead: Whether the writes are newer than an ordinary tensor's memory, which must not be read then.
        versions: Triples (tensor, version, changes) for ordinary tensors that were met or written: torch's version
            counter at that time, and the number of later changes that the record made itself.
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
        """Add to `overwritten` the moves whose elements a write destroys.

        Args:
            old: Moves that the write has removed.
            holes: Places that are written, as moves into them.
            moves: New moves into these places.
        """
        lost = [move for move in old if not isinstance(move.root, Constant)]
        self.overwritten += _without_kept(lost, self.used, moves) if lost and self.used else lost
        if self.used:
            self.used = Moves(holes).find(self.used)[1]

    def note(self, tensor: torch.Tensor, changes: int = 0) -> None:
        """Note a tensor's version counter, and the number of changes that the record is about to make."""
        if self.keep is not None and not tensor.is_inference():  # those have no counter
            self.versions.append((tensor, tensor._version, changes))

    def was_changed(self) -> bool:
        """Return whether an ordinary tensor was changed more often than the record knows."""
        known: dict[int, tuple[int, int]] = {}  # by counter now: lowest one before, and changes
        for tensor, before, changes in self.versions:
            # A parameter whose data were replaced no longer has this memory.
            if is_ordinary(tensor) and tensor.untyped_storage()._cdata == self.keep._cdata:
                lowest, more = known.get(tensor._version, (before, 0))
                known[tensor._version] = min(lowest, before), more + changes
        return any(count - lowest > changes for count, (lowest, changes) in known.items())


def constant_move(elements: torch.Tensor) -> Move:
    """Return the move of a flat constant; if all elements are equal, only one is stored."""
    count = elements.numel()
    values = as_integers(elements)  # by bits: 0.0 isn't -0.0
    rows = values if elements.itemsize < 16 else bits(elements).reshape(count, -1)
    is_one = count > 1 and torch.equal(rows[1:], rows[:-1])
    loops = ((count, 1, 0 if is_one else 1),) if count > 1 else ()
    return Move(Constant((elements[:1] if is_one else elements).clone()), 0, 0, loops)


def constant_of(moves: Moves, kind: Kind) -> torch.Tensor | None:
    """Return the dense tensor that moves from constants fill.

    None if elements are unwritten or come from elsewhere, or if more than `MOST_KNOWN` elements are not all equal.
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
    """Return the lost parts of old moves: those that were never read, or whose elements are in no new move."""
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
    """Return the reversed move: it writes to the places of the root that the move reads, to each place once."""
    loops = tuple([loop for loop in move.loops if loop[2]])
    return turned(move._replace(loops=loops))


def _all_moves(moves: Iterable[Move]) -> Iterator[Move]:
    """Yield the moves and, recursively, the moves into operands of their computed roots."""
    for move in moves:
        yield move
        for operand in move.root.tensors if isinstance(move.root, Computed) else ():
            yield from _all_moves(operand_moves(operand, move))

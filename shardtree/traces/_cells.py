"""What storages hold while code runs, and the refusal of what can't be recorded of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import shorten
from ._moves import Move, read_of, through, whole
from ._refusals import Refusals
from ._scatters import EXPANDED, hole_of, write_apart
from ._steps import Constant, Kind, bits, cast, reread, seen_through
from ._tracer import Cell, Tracer, is_ordinary

_FIX = """Do it after the load, or give it the tensor another way. What may be done to elements: views, cat, stack,
  copies, gathers by known indices, casts, and functions of each element."""


class Cells:
    """Which ordinary tensors hold what, by their storages, and how that is read and written.

    Attributes:
        cells: Cells of ordinary storages, by their addresses.
        lent: Storages whose memory others have, who see no traced value there: by what they got it, and where.
        refusals: What was refused.
    """

    def __init__(self) -> None:
        self.cells: dict[int, Cell] = {}
        self.lent: dict[int, tuple[StorageWeakRef, str]] = {}
        self.refusals = Refusals()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record one operation, and return its result: what a record does."""
        raise NotImplementedError

    def source(self, name: str, kind: Kind) -> Tracer:
        """Return the tracer of a source."""
        with torch._C._DisableTorchDispatch():
            meta = torch.empty(kind.shape, dtype=kind.dtype, device="meta")
        return Tracer(self, Cell(kind.numel, kind.dtype, whole(name, kind.numel)), meta)

    def fresh(self, meta: torch.Tensor) -> Tracer:
        """Return a new tensor like a meta one, of which nothing is written."""
        return Tracer(self, Cell(meta.untyped_storage().nbytes() // meta.itemsize, meta.dtype), meta)

    def find_cell(self, tensor: torch.Tensor) -> Cell | None:
        """Return a tensor's cell, None for an ordinary one that nothing is recorded of."""
        if isinstance(tensor, Tracer):
            return tensor.cell
        if not is_ordinary(tensor):
            return None
        cell = self.cells.get(tensor.untyped_storage()._cdata)
        if cell is not None and cell.dtype.itemsize != tensor.itemsize:
            if len(cell.writes):
                self.refuse("a view as a dtype of another size", [])
            # A buffer of bytes, say, that is cut into tensors: its unit is that of what is written first.
            cell.numel, cell.dtype = cell.numel * cell.dtype.itemsize // tensor.itemsize, tensor.dtype
        return cell

    def cell(self, tensor: torch.Tensor) -> Cell:
        """Return a tensor's cell; an ordinary one gets its own, with its present elements unless it is on meta."""
        cell = self.find_cell(tensor)
        if cell is None:
            if not is_ordinary(tensor):
                self.refuse(f"what is made with a {type(tensor).__name__}", [])
            storage = tensor.untyped_storage()
            count = storage.nbytes() // tensor.itemsize
            cell = Cell(count, tensor.dtype, keep=storage)
            if storage._cdata not in self.lent:  # those may have other elements at any time
                self.cells[storage._cdata] = cell
            if tensor.device.type != "meta" and count:
                with torch._C._DisableTorchDispatch():
                    elements = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (count,), (1,))
                    elements = elements.cpu().clone()
                    rows = bits(elements).reshape(count, -1)  # by bits: 0.0 isn't -0.0
                    is_one = count > 1 and bool((rows == rows[0]).all())
                cell.before = Constant(elements[:1].clone() if is_one else elements)
                loops = ((count, 1, 0 if is_one else 1),) if count > 1 else ()
                cell.writes.add(Move(cell.before, 0, 0, loops))
        return cell

    def as_tracer(self, value: Any) -> Any:
        """Return an ordinary tensor that was written to as a tracer of the same cell."""
        if not isinstance(value, torch.Tensor) or isinstance(value, Tracer) or (cell := self.find_cell(value)) is None:
            return value
        meta = torch.empty(cell.numel, dtype=value.dtype, device="meta")
        meta = meta.as_strided(value.shape, value.stride(), value.storage_offset())
        meta = meta.conj() if value.is_conj() else meta
        return Tracer(self, cell, torch._neg_view(meta) if value.is_neg() else meta)

    def seen(self, cell: Cell, view: torch.Tensor) -> tuple[Any, ...]:
        """Return the steps that a storage's elements go through in a view of it."""
        return (*reread(cell.dtype, view.dtype), *seen_through(view))

    def reads(self, tensor: torch.Tensor, into: Sequence[int], to: int = 0) -> list[Move]:
        """Return the moves that bring a tensor's elements to places with these steps."""
        view, cell = tensor.meta if isinstance(tensor, Tracer) else tensor, self.cell(tensor)
        moves = cell.writes.find([read_of(int(view.storage_offset()), view.shape, into, view.stride(), to)])[0]
        return list(through(moves, self.seen(cell, view)))

    def write(
        self, into: torch.Tensor, tensor: torch.Tensor, via: tuple[Any, ...] = (), *, keeps: bool = False
    ) -> None:
        """Record a ``copy_``, which broadcasts and casts.

        Args:
            into: what is written to.
            tensor: what is.
            via: what elements go through besides.
            keeps: whether it is made of what was there, which so isn't lost.
        """
        view = into.meta if isinstance(into, Tracer) else into
        tensor = tensor if tensor.shape == view.shape else tensor.expand(view.shape)
        via = via or cast(tensor.dtype, view.dtype)
        if (hole := hole_of(view)) is None:
            write_apart(self, into, tensor, via, keeps=keeps)
        else:
            moves = through(self.reads(tensor, view.stride(), int(view.storage_offset())), via)
            self.exchange(into, [hole], moves, keeps=keeps)

    def put(self, into: torch.Tensor, moves: Sequence[Move]) -> None:
        """Record that moves write all of a view, instead of what was there."""
        if (hole := hole_of(into.meta if isinstance(into, Tracer) else into)) is None:
            self.refuse("writing", [into], why=EXPANDED)
        self.exchange(into, [hole], moves)

    def exchange(
        self, into: torch.Tensor, holes: Sequence[Move], moves: Sequence[Move], *, keeps: bool = False
    ) -> None:
        """Record that moves write places of a storage, instead of what was there.

        Args:
            into: a view of the storage.
            holes: the places, nested.
            moves: what is written, as the view has it.
            keeps: whether it is made of what was there.
        """
        view, cell = into.meta if isinstance(into, Tracer) else into, self.cell(into)
        if cell.keep is not None and cell.keep._cdata in self.lent:
            self.refuse_write(self.lent[cell.keep._cdata][1], moves)
        count = sum([hole.numel for hole in holes])
        if count == cell.numel:
            old = cell.writes.clear()
        else:
            old = [move for hole in holes if count and len(cell.writes) for move in cell.writes.take(hole)]
        if not keeps:
            cell.overwritten += [move for move in old if not isinstance(move.root, Constant)]
        for move in through(moves, (*seen_through(view), *reread(view.dtype, cell.dtype))):
            cell.writes.add(move)
        cell.is_ahead = True

    def names(self, tensors: Sequence[torch.Tensor]) -> str:
        """Return which sources are in tensors, for a message."""
        return self.names_in([cell for each in tensors if (cell := self.find_cell(each)) is not None])

    def names_in(self, cells: Sequence[Cell]) -> str:
        """Return which sources are in cells, for a message."""
        moves = (move for cell in cells for move in cell.writes if not isinstance(move.root, Constant))
        roots = dict.fromkeys(repr(str(move.root)) for move in moves)
        return ", ".join(shorten(roots, shown=3)) or "a new tensor"

    def refuse(self, name: str, tensors: Sequence[torch.Tensor], why: str | None = None) -> NoReturn:
        """Raise the error for an operation that isn't recorded.

        Args:
            name: Name of the operation.
            tensors: Tensors that it was given.
            why: Reason, if it isn't that elements are needed.

        Raises:
            TraceError: names it, the sources and the caller's line.
        """
        names = self.names(tensors)
        what = f"{name} needs elements of {names}, which has none while it is traced"
        what = what if why is None else f"{name} can't be recorded for {names}: {why}"
        self.refusals.refuse(name, what, _FIX)

    def refuse_write(self, lent: str, moves: Sequence[Move]) -> NoReturn:
        """Raise the error for traced values that go to memory that others have.

        Raises:
            TraceError: names the sources, who has the memory since when, and the caller's line.
        """
        roots = ", ".join(shorten(dict.fromkeys(repr(str(move.root)) for move in moves), shown=3)) or "a number"
        fix = "Write to a new tensor, or take what needs the memory before: a copy, or data_ptr() to compare."
        self.refusals.refuse(
            "a write", f"a write of {roots} to memory that the code gave to {lent}, which can't see it", fix
        )

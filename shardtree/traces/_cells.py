"""Tensors without data, on which code runs, and the cells that have what storages hold meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.codec import dtype_name, format_tag, is_tagged
from ..errors import TraceError, error_text, shorten
from ._arguments import is_ordinary, tensors_in
from ._constants import MetaConstants
from ._moves import Move, Written, read_of, through, whole
from ._problems import lost
from ._refusals import RunRefusals, caller
from ._steps import Constant, Kind, bits, reread, seen_through

_FIX = """Do it after the load, or give it the tensor another way. What may be done to elements: views, cat, stack,
  copies, gathers by known indices, casts, and functions of each element."""


class MemoryCell:
    """The elements of a storage while code runs.

    Attributes:
        numel: Number of elements of the storage.
        dtype: Unit of the storage: the dtype of the tensor by which it was first met.
        writes: what was written to it.
        overwritten: what of sources was there, and then something else over it.
        keep: the storage of an ordinary tensor.
        before: what an ordinary tensor held when it was met.
        is_ahead: whether an ordinary tensor's memory isn't what `writes` says, so that it mustn't be read.
        versions: ordinary tensors by which it was met or written to, with torch's count of changes then, and how many
            more the record made.
    """

    __slots__ = ("before", "dtype", "is_ahead", "keep", "numel", "overwritten", "versions", "writes")

    def __init__(self, numel: int, dtype: torch.dtype, writes: Iterable[Move] = (), keep: Any = None) -> None:
        self.numel, self.dtype, self.writes, self.keep = numel, dtype, Written(writes), keep
        self.overwritten: list[Move] = []
        self.before: Constant | None = None
        self.is_ahead = False
        self.versions: list[tuple[torch.Tensor, int, int]] = []

    def note(self, tensor: torch.Tensor, changes: int = 0) -> None:
        """Note what torch counts of a tensor's changes, and how many more the record makes."""
        if self.keep is not None and not tensor.is_inference():  # those have no count
            self.versions.append((tensor, tensor._version, changes))

    def was_changed(self) -> bool:
        """Return whether an ordinary tensor was changed more often than the record knows."""
        known: dict[int, tuple[int, int]] = {}  # by the count now, which views share: the lowest before, and changes
        for tensor, before, changes in self.versions:
            # A parameter whose data were replaced isn't of this memory any longer.
            if is_ordinary(tensor) and tensor.untyped_storage()._cdata == self.keep._cdata:
                lowest, more = known.get(tensor._version, (before, 0))
                known[tensor._version] = min(lowest, before), more + changes
        return any(count - lowest > changes for count, (lowest, changes) in known.items())


class Tracer(torch.Tensor):
    """A tensor without data: a view of a cell, of which a meta tensor has shape and strides."""

    record: Cells
    cell: MemoryCell
    meta: torch.Tensor

    @staticmethod
    def __new__(cls, record: Cells, cell: MemoryCell, meta: torch.Tensor) -> Tracer:
        if torch.is_inference_mode_enabled():
            # Sources are made outside of it, and torch takes no inference tensors for slices of others.
            with torch.inference_mode(mode=False):
                return Tracer(record, cell, meta)
        self: Tracer = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            # It says that it is on the CPU, and isn't: so torch refuses it as an ordinary tensor's `.data`, which it
            # would leave without memory, and crash on, in threads where no mode is on that could prevent it.
            device=torch.device("meta"),
            dispatch_device=True,
        )
        self.record, self.cell, self.meta = record, cell, meta
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Tracer({self.record.names([self])}, {Kind(tuple(self.shape), self.dtype)})"

    def __format__(self, spec: str) -> str:
        return repr(self)  # torch would ask a tensor without axes for its number

    # Of safetensors' slices, in whose place tracers are given to loaders.
    def get_shape(self) -> list[int]:
        """Return the shape, as safetensors' slices do."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return the dtype's name in safetensors."""
        if not is_tagged(self.dtype):
            self.record.refuse("get_dtype", [self], why=f"safetensors has no name for {dtype_name(self.dtype)}")
        return format_tag(self.dtype)

    def __deepcopy__(self, memo: Any) -> Tracer:
        return self.clone()  # type: ignore[return-value]

    @property  # torch's own would leave the cell and the meta tensor as they were
    def data(self) -> Tracer:
        """The same tensor, apart from gradients; a parameter's can be set."""
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, Tracer):
            self.record.refuse("setting the data, to an ordinary tensor, of what", [self])
        become(self, value)

    def as_subclass(self, cls: Any) -> NoReturn:
        self.record.refuse(f"as_subclass({cls.__name__})", [self])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        record = next(each.record for each in tensors_in(args, kwargs or {}) if isinstance(each, Tracer))
        return record.run(func, args, kwargs or {})


def become(tensor: torch.Tensor, tracer: Tracer) -> None:
    """Make a tensor, or a parameter with its attributes, a tracer: what setting its data to one means."""
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    new = torch.nn.Parameter(tracer, requires_grad=False) if is_parameter else tracer.detach()
    new.__dict__.update({word: value for word, value in tensor.__dict__.items() if word not in new.__dict__})
    if not isinstance(tensor, Tracer):
        tracer.record.replaced.append((tensor, new))
    torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call]


def _refuses(word: str, what: str) -> None:
    def refuse(self: Tracer, *args: Any, **kwargs: Any) -> NoReturn:
        self.record.refuse(what, [self])

    setattr(Tracer, word, refuse)


# What reads a tensor's memory without passing torch's dispatcher.
for _word in (
    *("numpy", "tolist", "data_ptr", "untyped_storage", "storage", "share_memory_", "__dlpack__", "__array__"),
    *("apply_", "map_", "map2_", "new", "resize_as"),
):
    _refuses(_word, _word.removeprefix("__").removesuffix("__"))
_refuses("__reduce_ex__", "pickling")


def meta_of(value: Any) -> Any:
    """Return an argument with meta tensors instead of tracers."""
    if isinstance(value, (list, tuple)):
        return [meta_of(each) for each in value]
    if isinstance(value, Tracer):
        return value.meta
    return value.to("meta") if isinstance(value, torch.Tensor) and value.ndim else value


class Cells(TorchDispatchMode):
    """Values of one run: what tensors hold, by their storages, and how that is read and written. `Record` fills them.

    Attributes:
        cells: Cells of ordinary storages, by their addresses.
        lent: Storages whose memory others have, who see no traced value there: by what they got it, and where.
        refusals: What was refused.
        constants: Known elements of meta tensors.
        replaced: Pairs of a tensor that was made a tracer and the one that has its memory since.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cells: dict[int, MemoryCell] = {}
        self.lent: dict[int, tuple[StorageWeakRef, str]] = {}
        self.refusals = RunRefusals()
        self.constants = MetaConstants()
        self.replaced: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Storages that the code itself made: what they hold is meant. As weak references, which keep addresses taken.
        self.own_storages: dict[int, StorageWeakRef] = {}
        self.storages: dict[int, torch.TypedStorage] = {}  # what code was given for storages, by their addresses
        self.is_done = False
        self.lock = threading.RLock()  # loaders use threads

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record one operation, and return its result: what a record does."""
        raise NotImplementedError

    def source(self, name: str, kind: Kind) -> Tracer:
        """Return the tracer of a source."""
        with torch._C._DisableTorchDispatch():
            meta = torch.empty(kind.shape, dtype=kind.dtype, device="meta")
        return Tracer(self, MemoryCell(kind.numel, kind.dtype, whole(name, kind.numel)), meta)

    def fresh(self, meta: torch.Tensor) -> Tracer:
        """Return a new tensor like a meta one, of which nothing is written."""
        return Tracer(self, MemoryCell(meta.untyped_storage().nbytes() // meta.itemsize, meta.dtype), meta)

    def find_cell(self, tensor: torch.Tensor) -> MemoryCell | None:
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

    def cell(self, tensor: torch.Tensor) -> MemoryCell:
        """Return a tensor's cell; an ordinary one gets its own, with its present elements if these are known."""
        cell = self.find_cell(tensor)
        if cell is None:
            if not is_ordinary(tensor):
                self.refuse(f"what is made with a {type(tensor).__name__}", [])
            storage = tensor.untyped_storage()
            count = storage.nbytes() // tensor.itemsize
            cell = MemoryCell(count, tensor.dtype, keep=storage)
            if storage._cdata not in self.lent:  # those may have other elements at any time
                self.cells[storage._cdata] = cell
            elements = self._elements(storage, tensor) if count else None
            if elements is not None:
                cell.before = Constant(elements)
                loops = ((count, 1, 0 if elements.numel() == 1 else 1),) if count > 1 else ()
                cell.writes.add(Move(cell.before, 0, 0, loops))
        return cell

    def _elements(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the flat elements of a storage, one if all are equal; None on meta, unless they are known."""
        if tensor.device.type == "meta":
            known = self.constants.elements(storage)
            return known if known is not None and known.dtype is tensor.dtype else None
        count = storage.nbytes() // tensor.itemsize
        with torch._C._DisableTorchDispatch():
            elements = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (count,), (1,))
            elements = elements.cpu().clone()
            rows = bits(elements).reshape(count, -1)  # by bits: 0.0 isn't -0.0
            return elements[:1].clone() if count > 1 and bool((rows == rows[0]).all()) else elements

    def as_tracer(self, value: Any) -> Any:
        """Return an ordinary tensor that was written to as a tracer of the same cell."""
        if not isinstance(value, torch.Tensor) or isinstance(value, Tracer) or (cell := self.find_cell(value)) is None:
            return value
        meta = torch.empty(cell.numel, dtype=value.dtype, device="meta")
        meta = meta.as_strided(value.shape, value.stride(), value.storage_offset())
        meta = meta.conj() if value.is_conj() else meta
        return Tracer(self, cell, torch._neg_view(meta) if value.is_neg() else meta)

    def seen(self, cell: MemoryCell, view: torch.Tensor) -> tuple[Any, ...]:
        """Return the steps that a storage's elements go through in a view of it."""
        return (*reread(cell.dtype, view.dtype), *seen_through(view))

    def reads(self, tensor: torch.Tensor, into: Sequence[int], to: int = 0) -> list[Move]:
        """Return the moves that bring a tensor's elements to places with these steps."""
        view, cell = tensor.meta if isinstance(tensor, Tracer) else tensor, self.cell(tensor)
        moves = cell.writes.find([read_of(int(view.storage_offset()), view.shape, into, view.stride(), to)])[0]
        return list(through(moves, self.seen(cell, view)))

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
        if not keeps and (sourced := [move for move in old if not isinstance(move.root, Constant)]):
            cell.overwritten += lost(sourced, moves)
        for move in through(moves, (*seen_through(view), *reread(view.dtype, cell.dtype))):
            cell.writes.add(move)
        cell.is_ahead = True

    # Whose memory it is.

    def held(self, tensor: torch.Tensor) -> MemoryCell | None:
        """Return the cell of a tensor that holds traced values, which are in no memory; else None."""
        if isinstance(tensor, Tracer) or not is_ordinary(tensor):
            return tensor.cell if isinstance(tensor, Tracer) else None
        with torch._C.DisableTorchFunction():
            cell = self.cells.get(tensor.untyped_storage()._cdata)
        return cell if cell is not None and cell.is_ahead else None

    def forget(self, tensor: torch.Tensor) -> None:
        """Let a tensor that holds no traced values have whatever is in its memory when it is read."""
        if is_ordinary(tensor) and self.held(tensor) is None:
            with self.lock, torch._C.DisableTorchFunction():
                self.cells.pop(tensor.untyped_storage()._cdata, None)

    def own(self, tensor: torch.Tensor) -> None:
        """Take a tensor for the code's own, which it may change while it is traced."""
        if is_ordinary(tensor):
            with self.lock, torch._C.DisableTorchFunction():
                storage = tensor.untyped_storage()
                self.own_storages.setdefault(storage._cdata, _weak_reference(storage))

    def lend(self, tensor: torch.Tensor, name: str) -> None:
        """Note that others have a tensor's memory from now on, by what they got it."""
        if is_ordinary(tensor) and tensor.device.type != "meta":
            if self.held(tensor) is not None:
                self.refuse(name, [tensor])
            self.forget(tensor)
            with self.lock, torch._C.DisableTorchFunction():
                storage = tensor.untyped_storage()
                self.lent.setdefault(storage._cdata, (_weak_reference(storage), f"{name} {caller()}"))

    def close(self) -> None:
        """Give ordinary tensors the memory back that they had before their data were set to tracers."""
        while self.replaced:
            torch.utils.swap_tensors(*self.replaced.pop())  # type: ignore[no-untyped-call]

    # Refusals.

    def names(self, tensors: Sequence[torch.Tensor]) -> str:
        """Return which sources are in tensors, for a message."""
        return self.names_in([cell for each in tensors if (cell := self.find_cell(each)) is not None])

    def names_in(self, cells: Sequence[MemoryCell]) -> str:
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

    def refuse_late(self, tensors: Sequence[torch.Tensor]) -> NoReturn:
        """Raise the error for an operation on what a trace has left behind.

        Raises:
            TraceError: Names the sources and the caller's line.
        """
        names = self.names([each for each in tensors if isinstance(each, Tracer)])
        what = f"a tensor without data, of {names}, is used after its trace has ended"
        fix = "Have the code write to tensors in place, or assign the real tensor in its stead before it is used."
        raise TraceError(error_text(f"trace: {what}", found=caller(), fix=fix))

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


def _weak_reference(storage: Any) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]

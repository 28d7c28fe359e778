"""Tensors without data, on which code runs, and the cells that have what storages hold meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.codec import dtype_name, format_tag, is_tagged
from ..core.lazy import dense
from ..errors import shorten
from ._arguments import is_ordinary, tensors_in
from ._memory_cell import MOST_KNOWN, MemoryCell, constant_move, constant_of
from ._moves import Move, Moves, Written, read_of, through, whole
from ._refusals import RunRefusals, caller
from ._steps import Constant, Kind, operator_name, reread, seen_through

_FIX = """Do it after the load, or give it the tensor another way. What may be done to elements: views, cat, stack,
  copies, gathers by known indices, casts, and functions of each element."""
_FIX_ENDED = "It has no elements: load them, or make the tensor anew."


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
                return cls(record, cell, meta)
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
        tensors = tensors_in(args, kwargs or {})
        record = next(each.record for each in tensors if isinstance(each, Tracer))
        if record.is_done:
            record.refuse(operator_name(func), tensors)
        return record.run(func, args, kwargs or {})


class Number(Tracer):
    """Result of `item` of a traced tensor of one element: it fills tensors, and refuses whatever else needs a number.

    As a tensor without axes, it would decide dtypes otherwise than Python's numbers do.
    """


def number_of(tracer: Tracer) -> Number:
    """Return the result of `item` of a traced tensor of one element."""
    with torch._C._DisableTorchDispatch():
        return Number(tracer.record, tracer.cell, tracer.meta.reshape(()))


def become(tensor: torch.Tensor, tracer: Tracer) -> None:
    """Make a tensor, or a parameter with its attributes, a tracer: what setting its data to one means."""
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    new = torch.nn.Parameter(tracer, requires_grad=False) if is_parameter else tracer.detach()
    new.__dict__.update({word: value for word, value in tensor.__dict__.items() if word not in new.__dict__})
    swap(tensor, new)
    tracer.record.undo.append(partial(swap, tensor, new))


def swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Swap what two tensors are, as torch's `swap_tensors` does.

    That one refuses tensors that have views, or that somebody holds weakly. Here, views keep the memory that they have,
    as after setting the data, and whoever holds a tensor has the same object as before.
    """
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


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
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cells: dict[int, MemoryCell] = {}
        self.lent: dict[int, tuple[StorageWeakRef, str]] = {}
        self.refusals = RunRefusals()
        # Storages that the code itself made: what they hold is meant. As weak references, which keep addresses taken.
        self.own_storages: dict[int, StorageWeakRef] = {}
        self.storages: dict[int, torch.TypedStorage] = {}  # what code was given for storages, by their addresses
        self.modules: dict[int, tuple[torch.nn.Module, dict[str, Any]]] = {}  # and what each held before
        self.undo: list[Callable[[], object]] = []  # what gives tensors back what they were, from the last one on
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
                self._read_as(cell, tensor.dtype)
            # A buffer of bytes, say, that is cut into tensors: its unit is that of what is written first.
            cell.numel, cell.dtype = cell.numel * cell.dtype.itemsize // tensor.itemsize, tensor.dtype
        return cell

    def cell(self, tensor: torch.Tensor) -> MemoryCell:
        """Return a tensor's cell; an ordinary one gets its own, with its present elements unless it is on meta."""
        cell = self.find_cell(tensor)
        if cell is None:
            if not is_ordinary(tensor):
                self.refuse(f"what is made with a {type(tensor).__name__}", [])
            storage = tensor.untyped_storage()
            count = storage.nbytes() // tensor.itemsize
            cell = MemoryCell(count, tensor.dtype, keep=storage)
            if storage._cdata not in self.lent:  # those may have other elements at any time
                self.cells[storage._cdata] = cell
            if tensor.device.type != "meta" and count:
                with torch._C._DisableTorchDispatch():
                    elements = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (count,), (1,))
                    move = constant_move(elements.cpu())
                cell.before = move.root
                cell.writes.add(move)
        return cell

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
        """Return the moves from a tensor's elements to a destination with strides `into` and offset `to`."""
        view, cell = tensor.meta if isinstance(tensor, Tracer) else tensor, self.cell(tensor)
        read = read_of(int(view.storage_offset()), view.shape, into, view.stride(), to)
        cell.used.append(read)
        moves = cell.writes.find([read])[0]
        return list(through(moves, self.seen(cell, view)))

    def known_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor's elements on the CPU, None if they are a source's, never written or on meta, or too many."""
        cell = self.find_cell(tensor)
        if cell is None or not (cell.is_ahead or isinstance(tensor, Tracer)):
            with torch._C._DisableTorchDispatch():
                return None if tensor.is_meta else tensor.cpu()
        moves = Moves(self.reads(tensor, dense(tuple(tensor.shape)).stride))
        return constant_of(moves, Kind(tuple(tensor.shape), tensor.dtype))

    def _read_as(self, cell: MemoryCell, dtype: torch.dtype) -> None:
        """Give the cell of a constant on meta another unit, in which its bytes are other elements."""
        value = None if cell.before is not None else constant_of(cell.writes, Kind((cell.numel,), cell.dtype))
        if value is None or cell.numel > MOST_KNOWN:
            self.refuse("a view as a dtype of another size", [])
        with torch._C._DisableTorchDispatch():
            cell.writes = Written([constant_move(value.contiguous().view(dtype))])

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
        cell.note_overwritten([] if keeps else old, holes, moves)
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

    def is_own(self, tensor: torch.Tensor) -> bool:
        """Return whether the code made or got an ordinary tensor's memory itself, and may change it."""
        with self.lock, torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()._cdata
            return storage in self.own_storages or storage in self.lent

    def lend(self, tensor: torch.Tensor, name: str) -> None:
        """Note that others have a tensor's memory from now on, by what they got it."""
        if is_ordinary(tensor) and tensor.device.type != "meta":
            if self.held(tensor) is not None:
                self.refuse(name, [tensor])
            self.forget(tensor)
            with self.lock, torch._C.DisableTorchFunction():
                storage = tensor.untyped_storage()
                self.lent.setdefault(storage._cdata, (_weak_reference(storage), f"{name} {caller()}"))

    # Refusals.

    def names(self, tensors: Sequence[torch.Tensor]) -> str:
        """Return which sources are in tensors, for a message."""
        return self.names_in([cell for each in tensors if (cell := self.find_cell(each)) is not None])

    def names_in(self, cells: Sequence[MemoryCell]) -> str:
        """Return which sources are in cells, for a message."""
        moves = (move for cell in cells for move in cell.writes if not isinstance(move.root, Constant))
        roots = dict.fromkeys(repr(str(move.root)) for move in moves)
        return ", ".join(shorten(roots, shown=3)) or "a new tensor"

    def is_blank(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on meta, and no source's elements are in its memory."""
        return not isinstance(tensor, Tracer) and tensor.is_meta and not self.has_sources(tensor)

    def has_sources(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's memory has elements of sources."""
        cell = self.find_cell(tensor)
        return cell is not None and not all(isinstance(move.root, Constant) for move in cell.writes)

    def refuse(
        self, name: str, tensors: Sequence[torch.Tensor], why: str | None = None, instead: str | None = None
    ) -> NoReturn:
        """Raise the error for an operation that isn't recorded.

        Args:
            name: Name of the operation.
            tensors: Tensors that it was given.
            why: Reason, if it isn't that elements are needed.
            instead: Advice for this operation.

        Raises:
            TraceError: names it, the sources and the caller's line.
        """
        names = self.names(tensors)
        if self.is_done:
            what = f"{name} of a tensor that a trace left, made of {names}: its recording has ended"
            self.refusals.refuse(name, what, _FIX_ENDED)
        what = f"{name} needs elements of {names}, which has none while it is traced"
        what = what if why is None else f"{name} can't be recorded for {names}: {why}"
        self.refusals.refuse(name, what, instead or _FIX)

    def refuse_meta(self, name: str) -> NoReturn:
        """Raise the error for an operation that asks for elements of a tensor on meta that nothing was loaded to.

        Raises:
            TraceError: names it and the caller's line.
        """
        fix = "Build the engine on the CPU, where the trace sees what its tensors hold before the load."
        self.refusals.refuse(name, f"{name} needs elements of a tensor on the meta device, which has none", fix)

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

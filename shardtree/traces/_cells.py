"""`Tracer`, a tensor without data, on which traced code runs; and `Cells`, the record of each storage's elements."""

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

_FIX = """Do this after the load, or write it with operations that can be traced: views, cat, stack, copies,
  gathers by known indices, casts, and functions of each element."""
_FIX_ENDED = "The tensor has no elements: load them, or create a new tensor."
PLAIN_ONLY = "traces record plain tensors, no subclasses"
OTHER_SIZE = "the new elements would be parts or groups of the recorded ones"


class Tracer(torch.Tensor):
    """A tensor without data: a view, with `meta`'s shape and strides, of a storage's recorded elements (`cell`)."""

    record: Cells
    cell: MemoryCell
    meta: torch.Tensor

    @staticmethod
    def __new__(cls, record: Cells, cell: MemoryCell, meta: torch.Tensor) -> Tracer:
        if torch.is_inference_mode_enabled():
            # Sources are made outside of this mode, and torch refuses inference tensors as slices of normal ones.
            with torch.inference_mode(mode=False):
                return cls(record, cell, meta)
        self: Tracer = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            # It claims to be on the CPU, but isn't, so that torch refuses it as an ordinary tensor's `.data`. Else that
            # tensor would lose its memory, and torch would crash on it, in threads where no mode can prevent this.
            device=torch.device("meta"),
            dispatch_device=True,
        )
        self.record, self.cell, self.meta = record, cell, meta
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Tracer({self.record.names([self])}, {Kind(tuple(self.shape), self.dtype)})"

    def __format__(self, spec: str) -> str:
        return repr(self)  # torch would ask a tensor without axes for its number

    # Methods of safetensors' slices, which loaders expect instead of tensors.
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
        """The same tensor without gradients; setting it to a tracer makes this one a view of that tracer's storage."""
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, Tracer):
            fix = "Copy into the tensor instead, with copy_."
            self.record.refuse("setting .data to an ordinary tensor", [self], "its elements would be lost", fix)
        become(self, value)

    def as_subclass(self, cls: Any) -> NoReturn:
        self.record.refuse(f"as_subclass({cls.__name__})", [self], why=PLAIN_ONLY)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        tensors = tensors_in(args, kwargs or {})
        record = next(tensor.record for tensor in tensors if isinstance(tensor, Tracer))
        if record.is_done:
            record.refuse(operator_name(func), tensors)
        return record.run(func, args, kwargs or {})


class Number(Tracer):
    """Result of ``item()`` for a traced tensor of one element: it can fill tensors; other uses of a number are refused.

    They are refused because this tensor without axes and the real result, a Python number, promote dtypes differently.
    """


def number_of(tracer: Tracer) -> Number:
    """Return the result of ``item()`` for a traced tensor of one element."""
    with torch._C._DisableTorchDispatch():
        return Number(tracer.record, tracer.cell, tracer.meta.reshape(()))


def become(tensor: torch.Tensor, tracer: Tracer) -> None:
    """Turn a tensor or Parameter into a tracer in place, for ``tensor.data = tracer``; its attributes stay."""
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    new = torch.nn.Parameter(tracer, requires_grad=False) if is_parameter else tracer.detach()
    new.__dict__.update({word: value for word, value in tensor.__dict__.items() if word not in new.__dict__})
    swap(tensor, new)
    tracer.record.undo.append(partial(swap, tensor, new))


def swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Swap the classes, attributes and contents of two tensor objects, as torch's `swap_tensors` does.

    Torch's function refuses tensors with views or weak references. Here, views keep their memory, as after setting the
    data, and weak references lead to the same object as before.
    """
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


def _refuses(word: str, what: str) -> None:
    def refuse(self: Tracer, *args: Any, **kwargs: Any) -> NoReturn:
        self.record.refuse(what, [self])

    setattr(Tracer, word, refuse)


# Methods that read a tensor's memory without torch's dispatcher.
for _word in (
    *("numpy", "tolist", "data_ptr", "untyped_storage", "storage", "share_memory_", "__dlpack__", "__array__"),
    *("apply_", "map_", "map2_", "new", "resize_as"),
):
    _refuses(_word, _word.removeprefix("__").removesuffix("__"))
_refuses("__reduce_ex__", "pickling")


def meta_of(value: Any) -> Any:
    """Return an argument with meta tensors in place of tensors; ordinary tensors without axes stay."""
    if isinstance(value, (list, tuple)):
        return [meta_of(item) for item in value]
    if isinstance(value, Tracer):
        return value.meta
    return value.to("meta") if isinstance(value, torch.Tensor) and value.ndim else value


class Cells(TorchDispatchMode):
    """Record of all storages' elements in one run, with reads and writes; `RecordingMode` adds torch's operations.

    A source is an input of the traced code. An ordinary tensor is no `Tracer`: it has memory, except on meta.

    Attributes:
        cells: Records (`MemoryCell`) of the storages of ordinary tensors, by the storages' addresses.
        lent: Storages whose memory the code gave to other objects, by address: (weak reference, function and line).
        refusals: Errors of the run, for operations that can't be recorded.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cells: dict[int, MemoryCell] = {}
        self.lent: dict[int, tuple[StorageWeakRef, str]] = {}
        self.refusals = RunRefusals()
        # Storages that the code created, and may change; the weak references keep their addresses from reuse.
        self.own_storages: dict[int, StorageWeakRef] = {}
        self.storages: dict[int, torch.TypedStorage] = {}  # proxies that the code got, by address
        self.modules: dict[int, tuple[torch.nn.Module, dict[str, Any]]] = {}  # with their earlier state
        self.undo: list[Callable[[], object]] = []  # restore tensors, in reverse order
        self.is_done = False
        self.lock = threading.RLock()  # loaders use threads

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record one operation, and return its result; subclasses implement this."""
        raise NotImplementedError

    def source(self, name: str, kind: Kind) -> Tracer:
        """Return a new tracer for a source, an input of the traced code, with the given name, shape and dtype."""
        with torch._C._DisableTorchDispatch():
            meta = torch.empty(kind.shape, dtype=kind.dtype, device="meta")
        return Tracer(self, MemoryCell(kind.numel, kind.dtype, whole(name, kind.numel)), meta)

    def fresh(self, meta: torch.Tensor) -> Tracer:
        """Return a new tracer with the shape and strides of a meta tensor; no elements are written yet."""
        return Tracer(self, MemoryCell(meta.untyped_storage().nbytes() // meta.itemsize, meta.dtype), meta)

    def find_cell(self, tensor: torch.Tensor) -> MemoryCell | None:
        """Return the record (`MemoryCell`) of a tensor's storage; None if it has none yet."""
        if isinstance(tensor, Tracer):
            return tensor.cell
        if not is_ordinary(tensor):
            return None
        cell = self.cells.get(tensor.untyped_storage()._cdata)
        if cell is not None and cell.dtype.itemsize != tensor.itemsize:
            if len(cell.writes):
                self._read_as(cell, tensor.dtype)
            # A buffer of bytes may be cut into tensors, for example; its unit is then the dtype of the first write.
            cell.numel, cell.dtype = cell.numel * cell.dtype.itemsize // tensor.itemsize, tensor.dtype
        return cell

    def cell(self, tensor: torch.Tensor) -> MemoryCell:
        """Return the record (`MemoryCell`) of a tensor's storage; a new one holds the elements that are in memory."""
        cell = self.find_cell(tensor)
        if cell is None:
            if not is_ordinary(tensor):
                self.refuse(f"an operation with a {type(tensor).__name__}", [], why=PLAIN_ONLY)
            storage = tensor.untyped_storage()
            count = storage.nbytes() // tensor.itemsize
            cell = MemoryCell(count, tensor.dtype, keep=storage)
            if storage._cdata not in self.lent:  # others may change these elements at any time
                self.cells[storage._cdata] = cell
            if tensor.device.type != "meta" and count:
                with torch._C._DisableTorchDispatch():
                    elements = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (count,), (1,))
                    move = constant_move(elements.cpu())
                cell.before = move.root
                cell.writes.add(move)
        return cell

    def as_tracer(self, value: Any) -> Any:
        """Return a tracer for an ordinary tensor whose storage has a cell (its record); any other value unchanged."""
        if not isinstance(value, torch.Tensor) or isinstance(value, Tracer) or (cell := self.find_cell(value)) is None:
            return value
        meta = torch.empty(cell.numel, dtype=value.dtype, device="meta")
        meta = meta.as_strided(value.shape, value.stride(), value.storage_offset())
        meta = meta.conj() if value.is_conj() else meta
        return Tracer(self, cell, torch._neg_view(meta) if value.is_neg() else meta)

    def seen(self, cell: MemoryCell, view: torch.Tensor) -> tuple[Any, ...]:
        """Return the steps from a storage's elements to a view's: reinterpreted bits, conjugation, negation."""
        return (*reread(cell.dtype, view.dtype), *seen_through(view))

    def reads(self, tensor: torch.Tensor, into: Sequence[int], to: int = 0) -> list[Move]:
        """Return moves that copy a tensor's elements into a flat tensor, with strides `into` from offset `to` on."""
        view, cell = tensor.meta if isinstance(tensor, Tracer) else tensor, self.cell(tensor)
        read = read_of(int(view.storage_offset()), view.shape, into, view.stride(), to)
        cell.used.append(read)
        moves = cell.writes.find([read])[0]
        return list(through(moves, self.seen(cell, view)))

    def known_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor's elements on the CPU; None if too many, or if some come from sources or are unknown."""
        cell = self.find_cell(tensor)
        if cell is None or not (cell.is_ahead or isinstance(tensor, Tracer)):
            with torch._C._DisableTorchDispatch():
                return None if tensor.is_meta else tensor.cpu()
        moves = Moves(self.reads(tensor, dense(tuple(tensor.shape)).stride))
        return constant_of(moves, Kind(tuple(tensor.shape), tensor.dtype))

    def _read_as(self, cell: MemoryCell, dtype: torch.dtype) -> None:
        """Change a cell's elements in place to a dtype of another size; refuse unless they are constants on meta."""
        value = None if cell.before is not None else constant_of(cell.writes, Kind((cell.numel,), cell.dtype))
        if value is None or cell.numel > MOST_KNOWN:
            self.refuse("a view as a dtype of another size", [], why=OTHER_SIZE)
        with torch._C._DisableTorchDispatch():
            cell.writes = Written([constant_move(value.contiguous().view(dtype))])

    def exchange(
        self, into: torch.Tensor, holes: Sequence[Move], moves: Sequence[Move], *, keeps: bool = False
    ) -> None:
        """Record a write: new elements replace old ones in a storage.

        Args:
            into: Any view of the storage.
            holes: Nested moves (see `is_nested`) whose destinations are the overwritten positions of the storage.
            moves: Moves that write the new elements, in the view's dtype, to these positions.
            keeps: Whether the new elements are computed from the old ones, which then don't count as lost.
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

    # Ownership of memory.

    def held(self, tensor: torch.Tensor) -> MemoryCell | None:
        """Return the cell of a tensor whose present elements are only in the record, not in memory; else None."""
        if isinstance(tensor, Tracer) or not is_ordinary(tensor):
            return tensor.cell if isinstance(tensor, Tracer) else None
        with torch._C.DisableTorchFunction():
            cell = self.cells.get(tensor.untyped_storage()._cdata)
        return cell if cell is not None and cell.is_ahead else None

    def forget(self, tensor: torch.Tensor) -> None:
        """Drop the record of an ordinary tensor whose memory is up to date, so that it is read from memory again."""
        if is_ordinary(tensor) and self.held(tensor) is None:
            with self.lock, torch._C.DisableTorchFunction():
                self.cells.pop(tensor.untyped_storage()._cdata, None)

    def own(self, tensor: torch.Tensor) -> None:
        """Record that the traced code created a tensor's memory, and may therefore change it."""
        if is_ordinary(tensor):
            with self.lock, torch._C.DisableTorchFunction():
                storage = tensor.untyped_storage()
                self.own_storages.setdefault(storage._cdata, _weak_reference(storage))

    def is_own(self, tensor: torch.Tensor) -> bool:
        """Return whether the code may change a tensor's memory: it created the memory or shared it with other code."""
        with self.lock, torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()._cdata
            return storage in self.own_storages or storage in self.lent

    def lend(self, tensor: torch.Tensor, name: str) -> None:
        """Record that a function, called `name`, gives a tensor's memory to other objects, which may then change it."""
        if is_ordinary(tensor) and tensor.device.type != "meta":
            if self.held(tensor) is not None:
                self.refuse(name, [tensor])
            self.forget(tensor)
            with self.lock, torch._C.DisableTorchFunction():
                storage = tensor.untyped_storage()
                self.lent.setdefault(storage._cdata, (_weak_reference(storage), f"{name} {caller()}"))

    # Refusals.

    def names(self, tensors: Sequence[torch.Tensor]) -> str:
        """Return the names of the sources (inputs of the code) that have elements in the given tensors, as text."""
        return self.names_in([cell for tensor in tensors if (cell := self.find_cell(tensor)) is not None])

    def names_in(self, cells: Sequence[MemoryCell]) -> str:
        """Return the names of the sources (inputs of the code) that have elements in the given cells, as text."""
        moves = (move for cell in cells for move in cell.writes if not isinstance(move.root, Constant))
        roots = dict.fromkeys(repr(str(move.root)) for move in moves)
        return ", ".join(shorten(roots, shown=3)) or "a new tensor"

    def is_blank(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on meta, and no elements of sources (the code's inputs) are recorded in it."""
        return not isinstance(tensor, Tracer) and tensor.is_meta and not self.has_sources(tensor)

    def has_sources(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's storage holds recorded elements of sources, the inputs of the traced code."""
        cell = self.find_cell(tensor)
        return cell is not None and not all(isinstance(move.root, Constant) for move in cell.writes)

    def refuse(
        self, name: str, tensors: Sequence[torch.Tensor], why: str | None = None, instead: str | None = None
    ) -> NoReturn:
        """Raise the error for an operation that isn't recorded.

        Args:
            name: Name of the operation.
            tensors: Tensors among its arguments.
            why: Reason of the refusal; None if the operation needs the values of elements.
            instead: Advice for this operation.

        Raises:
            TraceError: always; the error names the operation, the sources and the caller's line.
        """
        names = self.names(tensors)
        if self.is_done:
            ended = f"{name} of a tensor left over from a trace, made of {names}: its recording has ended"
            self.refusals.refuse(name, ended, _FIX_ENDED)
        message = f"{name} needs elements of {names}, which has none while it is traced"
        if why is not None:
            message = f"{name} cannot be recorded{f' for {names}' if tensors else ''}: {why}"
        self.refusals.refuse(name, message, instead or _FIX)

    def refuse_meta(self, name: str) -> NoReturn:
        """Raise the error for an operation that needs elements of a tensor on meta to which nothing was loaded.

        Raises:
            TraceError: always; the error names the operation and the caller's line.
        """
        fix = "Build the engine on the CPU, where the trace sees what its tensors hold before the load."
        self.refusals.refuse(name, f"{name} needs elements of a tensor on the meta device, which has none", fix)

    def refuse_write(self, lent: str, moves: Sequence[Move]) -> NoReturn:
        """Raise the error for a write of traced values to memory that the call `lent` gave to another object.

        Raises:
            TraceError: always; the error names the sources, `lent` and the line that writes.
        """
        roots = ", ".join(shorten(dict.fromkeys(repr(str(move.root)) for move in moves), shown=3)) or "a number"
        fix = "Write to a new tensor; or give away a copy of the memory, or for comparisons its data_ptr(), instead."
        self.refusals.refuse(
            "a write", f"a write of {roots} to memory that the code gave to {lent}, which cannot see the write", fix
        )


def _weak_reference(storage: Any) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]

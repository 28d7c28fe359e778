"""Recording: code runs once on tensors without data, and what it does to their elements is written down."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import TraceError, error_text, shorten
from ..lazy import dense
from . import _operations as operations
from ._lists import read_alone
from ._moves import Move, Moves, in_place, is_nested, read_of, rolled, through, whole
from ._scatters import EXPANDED, write_apart
from ._steps import Constant, Kind, bits, cast, kind_of, operator_name, reread, seen_through
from ._trace import Trace
from ._tracer import Cell, Tracer, become, is_ordinary, mapped, meta_of, tensors_in

_NAMES = {"_local_scalar_dense": "item, bool, int or float", "_to_copy": "to"}
_FIX = """Do it after the load, or give it the tensor another way. What may be done to elements: views, cat, stack,
  copies, gathers by known indices, casts, and functions of each element."""
_OURS = (str(PurePath(__file__).parent), str(PurePath(torch.__file__).parent))


class Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One run: which ordinary tensors hold what, by their storages, and how each operation is recorded."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cells: dict[int, Cell] = {}
        # Storages that the code itself made: what they hold is meant. As weak references, which keep addresses taken.
        self.own_storages: dict[int, StorageWeakRef] = {}
        self.lock = threading.RLock()  # loaders use threads, in which the mode isn't on but tracers work

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler for the first operation, which takes two seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    # Tensors and their cells.

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
            storage = tensor.untyped_storage()
            count = storage.nbytes() // tensor.itemsize
            cell = self.cells[storage._cdata] = Cell(count, tensor.dtype, keep=storage)
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

    def is_traced(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's memory isn't what it holds."""
        cell = None if isinstance(tensor, Tracer) else self.find_cell(tensor)
        return isinstance(tensor, Tracer) or (cell is not None and cell.is_ahead)

    def as_tracer(self, value: Any) -> Any:
        """Return an ordinary tensor that was written to as a tracer of the same cell."""
        if not isinstance(value, torch.Tensor) or isinstance(value, Tracer) or (cell := self.find_cell(value)) is None:
            return value
        meta = torch.empty(cell.numel, dtype=value.dtype, device="meta")
        meta = meta.as_strided(value.shape, value.stride(), value.storage_offset())
        meta = meta.conj() if value.is_conj() else meta
        return Tracer(self, cell, torch._neg_view(meta) if value.is_neg() else meta)

    def seen(self, cell: Cell, view: torch.Tensor) -> tuple[Any, ...]:
        """Return what a storage's elements go through in a view of it."""
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
        if (hole := _hole(view)) is None:
            write_apart(self, into, tensor, via, keeps=keeps)
        else:
            moves = through(self.reads(tensor, view.stride(), int(view.storage_offset())), via)
            self.exchange(into, [hole], moves, keeps=keeps)

    def put(self, into: torch.Tensor, moves: Sequence[Move]) -> None:
        """Record that moves write all of a view, instead of what was there."""
        if (hole := _hole(into.meta if isinstance(into, Tracer) else into)) is None:
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

    # Operations.

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record one operation, and return its result."""
        if func is torch.ops.prim.device.default:
            return torch.device("cpu")
        with self.lock:
            tensors = tensors_in(args, kwargs)
            if not any(isinstance(each, Tracer) for each in tensors):
                cells = [cell for each in tensors if (cell := self.find_cell(each)) is not None]
                if not any(cell.is_ahead for cell in cells):
                    return self._run_really(func, args, kwargs)
            # Composite ones aren't: `reshape` says that it is a view, and would copy what memory holds.
            if func.is_view and not _is_composite(func) and not isinstance(tensors[0], Tracer):
                return func(*args, **kwargs)
            return self._record(func, args, kwargs, tensors)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        first, name, original = tensors[0], operator_name(func), (args, kwargs, tensors)
        # In here the mode is off: what an ordinary tensor held would be taken for what it holds now.
        if not all(isinstance(each, Tracer) for each in tensors):
            args = tuple([mapped(self.as_tracer, each) for each in args])
            kwargs = {word: mapped(self.as_tracer, each) for word, each in kwargs.items()}
            tensors = tensors_in(args, kwargs)
        if isinstance(kwargs.get("out"), torch.Tensor):
            rest = {word: value for word, value in kwargs.items() if word != "out"}
            return operations.write_out(self, original[1]["out"], func.overloadpacket(*args, **rest))
        if (rule := operations.RULES.get(name)) is not None:
            result = rule(self, func, *args, **kwargs)
            return first if result is tensors[0] else result
        if _is_composite(func):
            with self:  # in here, and under inference_mode, these come whole
                return func.decompose(*args, **kwargs)
        if func.is_view or name in operations.VIEWS:
            return self._record_view(func, args, kwargs, tensors[0])
        if name in operations.ELEMENTWISE:
            return operations.elementwise(self, func, args, kwargs)
        if name.endswith("_") and name[:-1] in operations.ELEMENTWISE:
            packet = getattr(torch.ops.aten, name[:-1])
            result = self.run(getattr(packet, func._overloadname), args, kwargs)
            operations.check_cast(self, name, result, tensors[0])
            self.write(tensors[0], result, keeps=True)
            return first
        if not func._schema.is_mutable and self._are_blank(original[2]):
            return func(*original[0], **original[1])
        return self.refuse(_NAMES.get(name, name), tensors)

    def _are_blank(self, tensors: list[torch.Tensor]) -> bool:
        """Return whether tensors are on meta and no source is in them: what is made of them counts as never written."""
        if any(isinstance(each, Tracer) or each.device.type != "meta" for each in tensors):
            return False
        cells = [cell for each in tensors if (cell := self.find_cell(each)) is not None]
        return all(isinstance(move.root, Constant) for cell in cells for move in cell.writes)

    def _record_view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], base: torch.Tensor) -> Any:
        name = operator_name(func)

        def tracer(meta: torch.Tensor) -> Tracer:
            if meta.itemsize != base.itemsize:
                self.refuse(f"{name} as a dtype of another size", [base])
            own = meta.untyped_storage()._cdata == meta_of(base).untyped_storage()._cdata
            if meta.is_conj() or meta.is_neg() or (meta.numel() and not own):
                self.refuse(name, [base])
            return Tracer(self, self.cell(base), meta)

        return mapped(tracer, func(*map(meta_of, args), **{word: meta_of(each) for word, each in kwargs.items()}))

    def _run_really(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that no source's element takes part in, and note what is new, or empty still."""
        name = operator_name(func)
        changed = operations.changed(func, args, kwargs)
        if len(changed) == 1 and changed[0] is args[0]:
            storage = args[0].untyped_storage()._cdata
            is_fill, is_met = name in ("copy_", "fill_", "zero_"), self.find_cell(args[0]) is not None
            if is_fill and (storage not in self.own_storages or args[0].device.type == "meta"):
                return operations.RULES[name](self, func, *args, **kwargs)  # a model isn't changed by being traced
            result = func(*args, **kwargs)
            if is_fill and is_met:
                operations.RULES[name](self, func, *args, **kwargs)
                self.cells[storage].is_ahead = False
            elif is_met:  # filled by something else: what it holds now counts
                self.own_storages[storage] = _weak_reference(self.cells.pop(storage).keep)
            return result
        result = func(*args, **kwargs)
        for each in changed:  # what it holds now counts
            if (cell := self.cells.pop(each.untyped_storage()._cdata, None)) is not None:
                self.own_storages[each.untyped_storage()._cdata] = _weak_reference(cell.keep)
        if not func._schema.is_mutable and not func.is_view:
            mapped(lambda each: self._note(each, is_empty=name in operations.EMPTY), result)
        return result

    def _note(self, result: Any, *, is_empty: bool) -> None:
        if isinstance(result, torch.Tensor) and is_ordinary(result):
            storage = result.untyped_storage()
            self.own_storages.setdefault(storage._cdata, _weak_reference(storage))
            if is_empty and result.numel():
                self.cells[storage._cdata] = Cell(storage.nbytes() // result.itemsize, result.dtype, keep=storage)

    def names(self, tensors: Sequence[torch.Tensor]) -> str:
        """Return which sources are in tensors, for a message."""
        cells = [cell for each in tensors if (cell := self.find_cell(each)) is not None]
        moves = (move for cell in cells for move in cell.writes if not isinstance(move.root, Constant))
        roots = dict.fromkeys(repr(str(move.root)) for move in moves)
        return ", ".join(shorten(roots, shown=3)) or "a new tensor"

    def refuse(self, name: str, tensors: Sequence[torch.Tensor], why: str | None = None) -> NoReturn:
        """Raise the error for an operation that isn't recorded.

        Args:
            name: the operation.
            tensors: its arguments.
            why: the reason, if it isn't that elements are needed.

        Raises:
            TraceError: names it, the sources and the caller's line.
        """
        names = self.names(tensors)
        what = f"trace: {name} needs elements of {names}, which has none while it is traced"
        what = what if why is None else f"trace: {name} can't be recorded for {names}: {why}"
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
            frame = frame.f_back
        line = f"at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        raise TraceError(error_text(what, found=line, fix=_FIX))


def _hole(view: torch.Tensor) -> Move | None:
    """Return the places of a view as a read of them to themselves, None if they aren't nested."""
    place, stride = int(view.storage_offset()), view.stride()
    hole = read_of(place, view.shape, stride, stride, place)
    return hole if is_nested(hole) or not view.numel() else None


def _is_composite(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def _weak_reference(storage: Any) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


class Setter(TorchFunctionMode):
    """Has ``parameter.data = tracer`` make the parameter itself a tracer; torch would leave it without memory.

    And refuses what torch would read past the recorder: traced elements in lists.
    """

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.data.__set__ and isinstance(args[1], Tracer):  # type: ignore[attr-defined]
            return become(args[0], args[1])
        what, tensors = read_alone(func, args)
        if lost := [each for each in tensors if self.record.is_traced(each)]:
            self.record.refuse(what, lost)
        return func(*args, **(kwargs or {}))


def trace(
    function: Callable[[dict[str, Any]], Any],
    sources: Mapping[str, Any],
    *,
    into: Callable[[], Mapping[str, torch.Tensor]] | None = None,
) -> Trace:
    """Run loading code once on tensors without data, and return what it does to their elements.

    The code may take views of tensors, join, copy, cast and gather them by known indices, and compute each element from
    those at its place. Whatever asks for what the elements are is refused. Tensors of its own that it writes to aren't
    changed, unless it replaces them, so a model is best made on the meta device.

    Args:
        function: takes a dict of tensors by name, and returns tensors by name; or it fills what `into` names, as a
            model's own loader does: ``lambda tensors: model.load_weights(tensors.items())``.
        sources: anything with a shape and a dtype, by name: an open checkpoint, shards, tensors.
        into: is called afterwards for the destinations, as ``model.state_dict``. What they held before counts as
            never written.

    Raises:
        TraceError: the code asks for elements; names the operation, the source and the caller's line.

    Examples:
        >>> import shardtree as st
        >>> def load(tensors):
        ...     q, k, v = tensors["qkv"].chunk(3)
        ...     return {"q": q, "kv": torch.stack([k, v])}
        >>> found = st.trace(load, {"qkv": torch.empty(6, 4)})
        >>> print(found)
        trace: 1 source -> 2 outputs
          q: float32[2,4] =
            [a, b] = qkv[0:+a, b]  (a=2 b=4)
          kv: float32[2,2,4] =
            [a, b, c] = qkv[2:+(a b), c]  (a=2 b=2 c=4)
        >>> found.inverse()(found({"qkv": torch.arange(24.0).view(6, 4)}))["qkv"][1]
        tensor([4., 5., 6., 7.])

    References:
        `jax.make_jaxpr`, for the form.
    """
    record = Record()
    # An open checkpoint's metadata: its values would be made, and its objects read.
    entries = getattr(sources, "metadata", sources)
    kinds = {name: kind_of(each) for name, each in entries.items() if hasattr(each, "dtype")}
    tracers = {name: record.source(name, kind) for name, kind in kinds.items()}
    with Setter(record), record:
        result = function(dict(tracers))
        return _collect(record, kinds, _checked_outputs(result if into is None else into()), fills=into is not None)


def _collect(record: Record, kinds: Mapping[str, Kind], tensors: Mapping[str, torch.Tensor], *, fills: bool) -> Trace:
    """Return the trace of a run.

    Args:
        record: of the run.
        kinds: of the sources.
        tensors: the outputs.
        fills: whether they are destinations, of which only what was written counts.
    """
    outputs, moves, tied, losses = {}, {}, {}, {}
    first: dict[Any, str] = {}
    for name, tensor in tensors.items():
        outputs[name] = Kind(tuple(tensor.shape), tensor.dtype)
        cell = record.find_cell(tensor) if fills else record.cell(tensor)
        if cell is None:
            moves[name] = Moves()
            continue
        view, steps = tensor.meta if isinstance(tensor, Tracer) else tensor, dense(outputs[name].shape).stride
        place = (id(cell), view.storage_offset(), view.shape, view.stride(), view.dtype, seen_through(view))
        if tensor.numel() and (one := first.setdefault(place, name)) != name:
            tied[name] = one
        reads = record.reads(tensor, steps)
        moves[name] = Moves(rolled([move for move in reads if not fills or move.root is not cell.before]))
        if cell.overwritten:
            # Places that were overwritten several times are there several times: each is found where it meets first.
            there = read_of(int(view.storage_offset()), view.shape, steps, view.stride())
            losses[name] = Moves(map(in_place, Moves(cell.overwritten).find([there])[0]))
    return Trace(kinds, outputs, moves, tied, {name: each for name, each in losses.items() if len(each)})


def _checked_outputs(outputs: Any) -> dict[str, torch.Tensor]:
    """Return what code made, after checking that these are tensors by name."""
    if not isinstance(outputs, Mapping):
        wrong: list[str] = [type(outputs).__name__]
    else:
        wrong = [f"{name!r}: {type(each).__name__}" for name, each in outputs.items() if not _is_tensor(each)]
    if wrong:
        fix = "Return them, or pass into=model.state_dict for a loader that fills a model."
        raise TraceError(error_text("trace: the code gave no tensors by name", offenders=wrong, fix=fix))
    return dict(outputs)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tracer) or (isinstance(value, torch.Tensor) and is_ordinary(value))

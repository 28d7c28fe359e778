"""Recording: a dispatch mode stores the effect of each torch operation in the storages' records (`MemoryCell`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

from ..core.codec import dtype_name
from ..core.lazy import is_view
from ..errors import TraceError, error_text
from . import _constants as constants
from . import _operations as operations
from . import _scatters as scatters
from ._arguments import elements_of, is_composite, is_ordinary, is_plain, mapped, tensors_in, written
from ._cells import OTHER_SIZE, Cells, MemoryCell, Number, Tracer, meta_of
from ._leftovers import note_data
from ._memory import Watch
from ._steps import operator_name, takes_numbers_of
from ._writes import check_apart, copy_into

_NAMES = {"_local_scalar_dense": "item, bool, int or float", "_to_copy": "to"}
_LIFT = torch.ops.aten.lift_fresh.default  # the last step of making a tensor from data
_TAKE_NUMBERS = {"fill_", "copy_", "masked_fill_", "index_fill_"}
_FILLS = ("copy_", "fill_", "zero_")
_RESHAPING = {"t_", "transpose_", "squeeze_", "unsqueeze_", "swapaxes_", "swapdims_", "as_strided_", "detach_"}
"""In-place operations that make a tensor another view of its storage."""
_REPLACING = {*_RESHAPING, "set_", "resize_"}
_WRITES = {*_FILLS, *(name for name in scatters.RULES if name.endswith("_"))}


def _needs_elements(func: Any, error: Exception) -> bool:
    """Return whether an operation failed because a tensor on meta has no elements."""
    return isinstance(error, NotImplementedError) or operator_name(func) == "_local_scalar_dense"


class RecordingMode(Cells):
    """The dispatch mode of one run, which records each of torch's operations.

    The code is the traced function and all that it calls. Traced values are elements that are in the record, but not in
    memory. A `Tracer` has them; so has an ordinary tensor, such as a parameter, after a write to it was recorded.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler for the first operation, which takes two seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_done:
            return func(*args, **(kwargs or {}))
        if types and not any(issubclass(kind, Tracer) for kind in types) and not all(map(is_plain, types)):
            return NotImplemented  # a wrapper of other tensors dispatches to operations on these, which are recorded
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record one operation, and return its result."""
        if func is torch.ops.prim.device.default:
            return torch.device("cpu")
        # The record's own calls aren't the code's, so `Watch` must not see them.
        with self.lock, torch._C.DisableTorchFunction():
            tensors = tensors_in(args, kwargs)
            is_reshaping = self._is_reshaping(func, tensors)
            record = None if is_reshaping else self._recorder(func, args, kwargs, tensors)
            if record is not None:
                return record(func, args, kwargs)
        # The lock isn't held here: the operation may take long, or wait for another thread.
        try:
            result = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if not any(tensor.is_meta for tensor in tensors) or not _needs_elements(func, error):
                raise
            with self.lock, torch._C.DisableTorchFunction():
                return self._of_constants(func, args, kwargs)
        if not (func.is_view or is_reshaping) or func is _LIFT:
            with self.lock, torch._C.DisableTorchFunction():
                self._note(func, args, kwargs, result)
        return result

    def _is_reshaping(self, func: Any, tensors: list[torch.Tensor]) -> bool:
        """Return whether an operation, such as `t_`, makes an ordinary tensor another view of the same storage."""
        if (name := operator_name(func)) not in _REPLACING or not is_ordinary(tensors[0]):
            return False
        if not self.is_own(tensors[0]):
            note_data(self, tensors[0])
        if name not in _RESHAPING:
            return False
        self._note_versions(tensors[:1], tensors[:1])
        return True

    def _recorder(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Callable[..., Any] | None:
        """Return the method that records an operation; None if torch just executes it."""
        if self._is_traced(func, tensors) and not self._is_of_constants(func, tensors):
            return self._record_traced
        if self._fills_model(func, args):
            return self._record_fill
        return self._record_change if self._models_among(func, args, kwargs) else None

    def _record_traced(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in(args, kwargs)
        result = self._recorded(func, args, kwargs, tensors)
        if ordinary := [each for each in tensors if not isinstance(each, Tracer)]:
            self._note_versions(ordinary, [] if is_composite(func) else written(func, args, kwargs))
        return result

    def _recorded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        try:
            return self._record(func, args, kwargs, tensors)
        except (TraceError, IndexError):  # an index out of bounds is the code's own error
            raise
        except Exception as error:
            try:
                func(*meta_of(args), **{word: meta_of(value) for word, value in kwargs.items()})
            except Exception:
                raise error from None  # it would be raised without a trace, too
            self.refuse(operator_name(func), tensors, why=f"these arguments are not supported: {error}")

    def _is_traced(self, func: Any, tensors: list[torch.Tensor]) -> bool:
        """Return whether an operation gets tensors with traced values, and isn't just a view of an ordinary tensor."""
        if not any(isinstance(each, Tracer) for each in tensors):
            cells = [cell for each in tensors if (cell := self.find_cell(elements_of(each))) is not None]
            if not any(cell.is_ahead for cell in cells):
                return False
        # Composite operations don't count as views: `reshape` claims to be one, but may copy memory.
        return not func.is_view or is_composite(func) or isinstance(tensors[0], Tracer)

    def _is_of_constants(self, func: Any, tensors: list[torch.Tensor]) -> bool:
        """Return whether an operation makes a new tensor, and gets only meta tensors without elements of sources."""
        return not func._schema.is_mutable and all(map(self.is_blank, tensors))

    def _of_constants(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result, on known elements, of an operation such as `nonzero`, which torch can't do on meta.

        Raises:
            TraceError: some elements aren't known.
        """
        if (result := constants.computed(self, func, args, kwargs)) is None:
            self.refuse_meta(_NAMES.get(operator_name(func), operator_name(func)))
        return result

    def _fills_model(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Return whether an operation writes to an ordinary tensor on meta, or to one that the code didn't create."""
        if operator_name(func) not in _WRITES or not is_ordinary(args[0]):
            return False
        return args[0].untyped_storage()._cdata not in self.own_storages or args[0].device.type == "meta"

    def _models_among(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors, such as a model's parameters, that an operation changes and the code didn't create.

        Such a change is only recorded; the tensors' memory isn't changed. Tensors on meta are left out.
        """
        if not func._schema.is_mutable or operator_name(func) == "set_":
            return []
        return [
            tensor
            for tensor in written(func, args, kwargs)
            if is_ordinary(tensor) and tensor.numel() and tensor.device.type != "meta" and not self.is_own(tensor)
        ]

    def _record_change(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a change of tensors that the code didn't create, such as parameters; their memory isn't changed."""
        for tensor in self._models_among(func, args, kwargs):
            self.cell(tensor).is_ahead = True  # from here on, their elements are read from the record
        return self._record_traced(func, args, kwargs)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        first, name, original = tensors[0], operator_name(func), (args, kwargs, tensors)
        if Number in map(type, tensors) and not func.is_view:
            self._check_number(name, tensors)
        # The mode is off here, so torch would read an ordinary tensor's memory instead of its record.
        if not all(isinstance(tensor, Tracer) for tensor in tensors):
            args = tuple([mapped(self.as_tracer, value) for value in args])
            kwargs = {word: mapped(self.as_tracer, value) for word, value in kwargs.items()}
            tensors = tensors_in(args, kwargs)
        if isinstance(kwargs.get("out"), torch.Tensor):
            return operations.write_out(self, func, original[1]["out"], args, kwargs)
        if (rule := operations.RULES.get(name)) is not None:
            result = rule(self, func, *args, **kwargs)
            return first if result is tensors[0] else result
        if is_composite(func):
            with self:  # composite operations arrive whole here, and in inference_mode
                return func.decompose(*args, **kwargs)
        if func.is_view or name in operations.VIEWS:
            return self._record_view(func, args, kwargs, tensors[0])
        if name in operations.ELEMENTWISE:
            return operations.elementwise(self, func, args, kwargs)
        if name.endswith("_") and name[:-1] in operations.ELEMENTWISE:
            packet = getattr(torch.ops.aten, name[:-1])
            check_apart(self, name, tensors[0], tensors[1:])
            result = self.run(getattr(packet, func._overloadname), args, kwargs)
            operations.check_cast(self, name, result, tensors[0])
            copy_into(self, tensors[0], result, keeps=True)
            return first
        return self._record_constants(func, *original[:2], tensors)

    def _check_number(self, name: str, tensors: list[torch.Tensor]) -> None:
        """Check an operation that gets a traced number, which is a result of `item`.

        Raises:
            TraceError: the operation doesn't just fill its first tensor with the number, or the number may be out of
                range for the tensor's dtype.
        """
        if name not in _TAKE_NUMBERS:
            fix = "Leave item() out: compute with the tensor itself."
            self.refuse(_NAMES.get(name, name), tensors, instead=fix)
        dtype = tensors[0].dtype
        for number in [tensor for tensor in tensors if isinstance(tensor, Number)]:
            if not takes_numbers_of(dtype, number.dtype):
                why = f"torch raises an error where a number leaves the range of {dtype_name(dtype)}"
                self.refuse(name, [number], why=why, instead="Leave item() out: copy the tensor itself, which casts.")

    def _record_constants(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        """Record an operation that has no rule of its own, and return its result.

        It is computed on constants. The maximum or minimum of a single element is that element, constant or not.

        Raises:
            TraceError: the operation needs elements that are not constants.
        """
        name = operator_name(func)
        is_view = torch.Tag.inplace_view in func.tags
        if func._schema.is_mutable and not is_view and not any(map(self.has_sources, tensors_in(args, kwargs))):
            changed = constants.change_constants(self, func, args, kwargs)
            return changed[0] if len(func._schema.returns) == 1 else tuple(changed) if func._schema.returns else None
        for rule in () if func._schema.is_mutable else (constants.computed, operations.of_one):
            if (result := rule(self, func, args, kwargs)) is not None:
                return result
        return self.refuse(_NAMES.get(name, name), tensors, instead=operations.INSTEAD.get(name))

    def _record_view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], base: torch.Tensor) -> Any:
        name = operator_name(func)

        def tracer(meta: torch.Tensor) -> Tracer:
            if meta.itemsize != base.itemsize:
                self.refuse(f"{name} as a dtype of another size", [base], why=OTHER_SIZE)
            if meta.is_conj() or meta.is_neg() or not is_view(meta, meta_of(base)):
                self.refuse(name, [base], why="the result is not a strided view of the same elements")
            return Tracer(self, self.cell(base), meta)

        return mapped(tracer, func(*map(meta_of, args), **{word: meta_of(each) for word, each in kwargs.items()}))

    def _note_versions(self, tensors: list[torch.Tensor], changed: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if (cell := self.find_cell(tensor)) is not None:
                changes = sum(each is tensor for each in changed)
                if changes or not cell.versions:
                    cell.note(tensor, changes)

    def _record_fill(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = operations.RULES[operator_name(func)](self, func, *args, **kwargs)
        self._note_versions(tensors_in(args, kwargs), [args[0]])
        return result

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note the tensors that an operation has made or changed, after torch has executed it."""
        name = operator_name(func)
        if name == "set_":
            # The code has the storage. Torch's own functions call `set_`, too, but the watch isn't active there.
            modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
            if "Storage" in func._overloadname and any(isinstance(mode, Watch) for mode in modes):
                self.lend(args[0], "a storage")
            return
        for tensor in written(func, args, kwargs):
            if is_ordinary(tensor) and (cell := self.find_cell(tensor)) is not None:
                if name in _FILLS:
                    self._record_fill(func, args, kwargs)
                    cell.is_ahead = False
                else:  # filled by another operation: its memory counts again
                    self.own(tensor)
                    self.forget(tensor)
        if func is _LIFT:
            self._note_new(result, is_empty=False)
            if not result.untyped_storage().resizable():
                self.lend(result, "an array")
        elif not func._schema.is_mutable:
            constants.note_constants(self, func, args, kwargs, result)
            mapped(lambda each: self._note_new(each, is_empty=name in constants.EMPTY), result)

    def _note_new(self, result: Any, *, is_empty: bool) -> None:
        if isinstance(result, torch.Tensor) and is_ordinary(result):
            self.own(result)
            if is_empty and result.numel():
                storage = result.untyped_storage()
                self.cells[storage._cdata] = MemoryCell(storage.nbytes() // result.itemsize, result.dtype, keep=storage)

    def check_unchanged(self) -> None:
        """Raise if a tensor of the record was changed without being recorded.

        Raises:
            TraceError: names the sources whose elements the changed tensors hold.
        """
        changed = [cell for cell in list(self.cells.values()) if cell.was_changed()]
        if changed:
            texts = [
                f"a {dtype_name(cell.dtype)} tensor of {cell.numel} elements, which holds {self.names_in([cell])}"
                for cell in changed
            ]
            fix = "Change them by torch's operations, in the traced thread or in threads that it starts."
            raise TraceError(error_text("trace: tensors were changed without being recorded", offenders=texts, fix=fix))

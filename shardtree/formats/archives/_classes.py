"""Classes that a pickle may name: those that the caller allows, and those known to be plain data."""

from __future__ import annotations

import dataclasses
import pickle
import signal
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from types import SimpleNamespace
from typing import Any, BinaryIO, ClassVar, cast

import torch

from ...errors import UnsupportedValue, error_text
from ...kit import Record, addresses_of, exactly, named_types, type_name
from ..pickles import Constructor, Global

Child = Callable[..., Any]
"""Function that copies a child of a value; further arguments are the steps of its path."""

# This section makes constructors of the classes that the caller allows.


def constructors(types: Iterable[type]) -> dict[tuple[str, str], Constructor]:
    """Return constructors for instances of classes, by module and qualified name.

    No `__init__` runs. Only the fields of a dataclass are set.

    Args:
        types: Enums, dataclasses and named tuples.

    Raises:
        UnsupportedValue: A class is none of these.

    Examples:
        >>> from http import HTTPStatus
        >>> constructors([HTTPStatus])["http", "HTTPStatus"].make(200)
        <HTTPStatus.OK: 200>
    """
    return {name: _constructor(cls) for cls in named_types(types).values() for name in _names_in_pickles(cls)}


def _names_in_pickles(cls: type) -> list[tuple[str, str]]:
    # A pickle names the module that held the class when it was written.
    return [(cls.__module__, cls.__qualname__), *map(_module_and_name, addresses_of(type_name(cls)))]


def _constructor(cls: type) -> Constructor:
    if issubclass(cls, Enum):
        return Constructor(_member_of(cls), keys=_hashable)
    if issubclass(cls, tuple):
        return Constructor(_tuple_of(cls))
    return Constructor(_empty_of(cls), _fill)


def _hashable(*values: Any) -> list[Any]:
    return [value for value in values if type(value).__hash__ is not None]


def _member_of(cls: type[Enum]) -> Callable[..., Enum]:
    def make(value: Any) -> Enum:
        try:
            return cls(value)
        except (ValueError, TypeError, KeyError):
            text = repr(value)[:200] if type(value) in (int, str) else f"a {type(value).__name__}"
            raise _mismatch_error(cls, f"value {text}", "the value of a member") from None

    return make


def _tuple_of(cls: type[tuple[Any, ...]]) -> Callable[..., Any]:
    names = cast(Any, cls)._fields

    def make(*items: Any) -> Any:
        if len(items) != len(names):
            raise _mismatch_error(cls, f"{len(items)} fields", f"{len(names)}")
        return tuple.__new__(cls, items)

    return make


def _empty_of(cls: type) -> Callable[..., Any]:
    def make(*args: Any) -> Any:
        if args:
            raise TypeError(f"arguments for {type_name(cls)}")
        # Not cls(...): __init__ could do anything, with arguments that the file chooses.
        return object.__new__(cls)

    return make


def _fill(value: Any, state: Any) -> None:
    names = [field.name for field in dataclasses.fields(value)]
    fields = _fields(state, names)
    missing = [name for name in names if name not in fields]
    if missing:
        raise _mismatch_error(type(value), f"no field {missing[0]!r}", f"the fields {names}"[:200])
    for name in names:
        object.__setattr__(value, name, fields[name])  # A frozen class's own __setattr__ would refuse.


def _fields(state: Any, names: list[str]) -> dict[str, Any]:
    if type(state) is list:  # The class is a frozen dataclass with slots.
        return dict(zip(names, state, strict=False))
    if type(state) is tuple:
        return {**(state[0] or {}), **(state[1] or {})}
    return exactly(dict, state)


def _mismatch_error(cls: type, found: str, expected: str) -> UnsupportedValue:
    heading = f"{type_name(cls)}: the class passed in types= does not fit the stored value"
    fix = "Pass the class with the members or fields that it had when the value was saved."
    return UnsupportedValue(error_text(heading, found=found, expected=expected, fix=fix))


# This section lists other names in checkpoints of training programs: plain classes of Megatron-Core, and kinds of
# tensors that aren't supported, each with an error that gives advice.

_MEGATRON_ENUMS = {
    "enums": ("ModelType", "Fp8Recipe", "Fp4Recipe"),
    "transformer.enums": ("ModelType", "LayerType", "AttnType", "AttnMaskType", "AttnBackend", "CudaGraphScope"),
    "rerun_state_machine": ("RerunDiagnostic", "RerunMode", "RerunState"),
}
_MEGATRON_RECORDS = {"optimizer.optimizer_config": ("OptimizerConfig",)}


def _full_names(modules: Mapping[str, tuple[str, ...]]) -> frozenset[str]:
    return frozenset(f"megatron.core.{module}.{name}" for module, names in modules.items() for name in names)


_ENUMS, _RECORDS = _full_names(_MEGATRON_ENUMS), _full_names(_MEGATRON_RECORDS)


def _module_and_name(type_name: str) -> tuple[str, str]:
    module, _, name = type_name.rpartition(".")
    return module, name


def _member(type_name: str) -> Constructor:
    """Return a constructor of `Record`s for the members of an enum that is not imported.

    The record's name is None, since a pickle has only a member's value.
    """
    return Constructor(lambda value: Record(type_name, {"name": None, "value": value}))


def _record(type_name: str) -> Constructor:
    return Constructor(lambda: Record(type_name, {}), _fill_record)


def _fill_record(record: Any, state: Any) -> None:
    record.fields.update({exactly(str, name): value for name, value in exactly(dict, state).items()})


def is_named(record: Record) -> bool:
    """Return whether a record is one that this module makes from pickles: only such a record can be pickled again.

    Examples:
        >>> is_named(Record("megatron.core.enums.ModelType", {"name": None, "value": 1}))
        True
        >>> is_named(Record("train.Mode", {"name": None, "value": 1}))
        False
    """
    return record.type_name in _RECORDS or (
        record.type_name in _ENUMS and record.fields.keys() == {"name", "value"} and record.fields["name"] is None
    )


def _refusal(what: str, instead: str) -> Callable[..., Any]:
    def make(*args: Any) -> Any:
        fix = f"{instead} LoadOptions(allow_pickle=True) reads it with torch.load, and runs any code in the file."
        raise UnsupportedValue(error_text(what, fix=fix))

    return make


_SPARSE = Constructor(_refusal("a sparse tensor", "Store its indices and values, or tensor.to_dense();"))
_QUANTISED = Constructor(_refusal("a quantised tensor", "Store tensor.dequantize();"))
_NESTED = Constructor(_refusal("a nested tensor", "Store its parts as a list;"))
_META = Constructor(_refusal("a tensor on the meta device, without elements", "Store a materialised tensor;"))
_SUBCLASS = Constructor(_refusal("a subclass of torch.Tensor", "Store plain tensors;"))

NAMED: dict[tuple[str, str], Any] = {
    **{_module_and_name(name): _member(name) for name in _ENUMS},
    **{_module_and_name(name): _record(name) for name in _RECORDS},
    ("signal", "Signals"): Constructor(lambda number: signal.Signals(exactly(int, number))),
    ("torch._utils", "_rebuild_sparse_tensor"): _SPARSE,
    ("torch._utils", "_rebuild_sparse_csr_tensor"): _SPARSE,
    ("torch._utils", "_rebuild_qtensor"): _QUANTISED,
    ("torch._utils", "_rebuild_nested_tensor"): _NESTED,
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): _META,
    ("torch._utils", "_rebuild_wrapper_subclass"): _SUBCLASS,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.qscheme)},
}


# This section pickles such records again, by the names of their classes, as Megatron-Core does.


def named_record(value: Any, child: Child) -> Any:
    """Return a copy of a record for `save_named`; `NotImplemented` for values that `is_named` doesn't accept.

    Args:
        value: Value of any type.
        child: Function that copies a field's value.

    Examples:
        >>> record = Record("megatron.core.enums.ModelType", {"name": None, "value": 1})
        >>> named_record(record, lambda field, name: field) == record
        True
        >>> named_record(Record("train.Mode", {"name": None, "value": 1}), lambda field, name: field)
        NotImplemented
    """
    if not isinstance(value, Record) or not is_named(value):
        return NotImplemented
    return Record(value.type_name, {name: child(field, name) for name, field in value.fields.items()})


def save_named(value: Any, file: BinaryIO) -> None:
    """Write a value to a file as torch.save does; records from `named_record` are pickled by their class's name."""
    torch.save(value, file, pickle_module=_MODULE)


def _save_name(pickler: Any, name: Global) -> None:
    pickler.write(pickle.GLOBAL + f"{name.module}\n{name.name}\n".encode())


def _save_record(pickler: Any, record: Record) -> None:
    module, _, name = record.type_name.rpartition(".")
    pickler.save(Global(module, name))
    if record.fields.keys() == {"name", "value"}:
        pickler.save((record.fields["value"],))
        pickler.write(pickle.REDUCE)
        return
    pickler.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
    pickler.save(dict(record.fields))
    pickler.write(pickle.BUILD)


class _NamePickler(pickle._Pickler):
    """A pickler that writes any class's name; pickle's own pickler first imports the class, which may be missing."""

    dispatch: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        **pickle._Pickler.dispatch,
        Global: _save_name,
        Record: _save_record,
    }


_MODULE = SimpleNamespace(__name__="pickle", Pickler=_NamePickler)

"""Members of Megatron-Core's enums and its configurations, pickled by the names of their classes as it does itself."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, BinaryIO, ClassVar

import torch

from ...trees import Record
from .._nodes import Child
from ..pickles import Global
from ._named import is_named


def named_record(value: Any, child: Child) -> Any:
    """Return the copy of a record that can be pickled, `NotImplemented` for anything else.

    Args:
        value: any value.
        child: copies a field.

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
    """Write an archive as torch.save does, of a value that may hold what `named_record` returns."""
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


class _Pickler(pickle._Pickler):
    """Writes the names of classes that needn't be importable here, which pickle's own doesn't."""

    dispatch: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        **pickle._Pickler.dispatch,
        Global: _save_name,
        Record: _save_record,
    }


_MODULE = SimpleNamespace(__name__="pickle", Pickler=_Pickler)

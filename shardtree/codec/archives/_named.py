"""Names that pickles of training programs have beside data: classes known to be plain, and tensors that aren't read."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...errors import UnsupportedValue, error_text
from ...trees import Record
from .._nodes import exactly
from ..pickles import Constructor

_MEGATRON_ENUMS = {
    "enums": ("ModelType", "Fp8Recipe", "Fp4Recipe"),
    "transformer.enums": ("ModelType", "LayerType", "AttnType", "AttnMaskType", "AttnBackend", "CudaGraphScope"),
    "rerun_state_machine": ("RerunDiagnostic", "RerunMode", "RerunState"),
}
_MEGATRON_RECORDS = {"optimizer.optimizer_config": ("OptimizerConfig",)}


def _full(modules: Mapping[str, tuple[str, ...]]) -> frozenset[str]:
    return frozenset(f"megatron.core.{module}.{name}" for module, names in modules.items() for name in names)


_ENUMS, _RECORDS = _full(_MEGATRON_ENUMS), _full(_MEGATRON_RECORDS)


def _place(type_name: str) -> tuple[str, str]:
    module, _, name = type_name.rpartition(".")
    return module, name


def _member(type_name: str) -> Constructor:
    """Return what makes an enum's member a `Record`; only its value is in a pickle, not its name."""
    return Constructor(lambda value: Record(type_name, {"name": None, "value": value}))


def _record(type_name: str) -> Constructor:
    return Constructor(lambda: Record(type_name, {}), _fill_record)


def _fill_record(record: Any, state: Any) -> None:
    record.fields.update({exactly(str, name): value for name, value in exactly(dict, state).items()})


def is_named(record: Record) -> bool:
    """Return whether a record is what this module makes of a pickle, so that it can be pickled again.

    Examples:
        >>> is_named(Record("megatron.core.enums.ModelType", {"name": None, "value": 1}))
        True
        >>> is_named(Record("train.Mode", {"name": None, "value": 1}))
        False
    """
    return record.type_name in _RECORDS or (
        record.type_name in _ENUMS and record.fields.keys() == {"name", "value"} and record.fields["name"] is None
    )


def _refused(what: str, instead: str) -> Callable[..., Any]:
    def make(*args: Any) -> Any:
        fix = f"{instead} allow_pickle=True reads it with torch.load, and runs whatever code it brings."
        raise UnsupportedValue(error_text(what, fix=fix))

    return make


_SPARSE = Constructor(_refused("a sparse tensor", "Store its indices and values, or tensor.to_dense();"))
_QUANTISED = Constructor(_refused("a quantised tensor", "Store tensor.dequantize();"))
_NESTED = Constructor(_refused("a nested tensor", "Store its parts as a list;"))
_META = Constructor(_refused("a tensor without elements, on the meta device", "Store one that has some;"))
_SUBCLASS = Constructor(_refused("a subclass of torch.Tensor", "Store plain tensors;"))

NAMED: dict[tuple[str, str], Any] = {
    **{_place(name): _member(name) for name in _ENUMS},
    **{_place(name): _record(name) for name in _RECORDS},
    ("signal", "Signals"): Constructor(lambda number: signal.Signals(exactly(int, number))),
    ("torch._utils", "_rebuild_sparse_tensor"): _SPARSE,
    ("torch._utils", "_rebuild_sparse_csr_tensor"): _SPARSE,
    ("torch._utils", "_rebuild_qtensor"): _QUANTISED,
    ("torch._utils", "_rebuild_nested_tensor"): _NESTED,
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): _META,
    ("torch._utils", "_rebuild_wrapper_subclass"): _SUBCLASS,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.qscheme)},
}

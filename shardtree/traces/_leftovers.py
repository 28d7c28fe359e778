"""Tracers that code leaves in modules: they are taken out when a trace ends, and earlier values are put back."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from ._cells import Cells, Tracer

_TABLES = ("_parameters", "_buffers")


def note_module(record: Cells, module: torch.nn.Module) -> None:
    """Note what a module holds, when the code is about to change it for the first time."""
    if id(module) not in record.modules:
        record.modules[id(module)] = module, [dict(table) for table in _tables(module)]


def put_back(record: Cells) -> None:
    """Take what a recording that ends has made out of modules and parameters."""
    for tensor, old in reversed(record.replaced):
        with suppress(RuntimeError):  # somebody holds it weakly: then it stays, and says that its trace has ended
            torch.utils.swap_tensors(tensor, old)  # type: ignore[no-untyped-call]
    for module, before in record.modules.values():
        for table in _tables(module):
            for name in [name for name, value in table.items() if isinstance(value, Tracer)]:
                del table[name]
                _put_back(module, name, before)


def _put_back(module: torch.nn.Module, name: str, before: list[dict[str, Any]]) -> None:
    for table, old in zip(_tables(module), before, strict=False):
        if name in old and not isinstance(old[name], Tracer):
            table[name] = old[name]


def _tables(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Return the dicts that have a module's attributes; one that isn't initialised yet has one."""
    own = vars(module)
    return [own, *(own[table] for table in _TABLES if table in own)]

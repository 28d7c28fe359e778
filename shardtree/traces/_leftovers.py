"""Restoring models after a trace: modules, parameters and buffers get back their state from before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from ._cells import Cells, Tracer, swap

_TABLES = ("_parameters", "_buffers")


def modules_of(value: Any, depth: int = 4, seen: set[int] | None = None) -> Iterator[torch.nn.Module]:
    """Yield the modules that a function or an object reaches in a few steps, and their submodules."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.nn.Module):
        yield from value.modules()
    elif depth and _has_fields(value) and id(value) not in seen:
        seen.add(id(value))
        for item in _reached(value):
            yield from modules_of(item, depth - 1, seen)


def _reached(value: Any) -> Iterator[Any]:
    """Yield a container's items, an object's fields, or a function's closure, defaults and global modules."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # a variable that has no value yet
                yield cell.cell_contents
        yield value.__defaults__
        variables = (value.__globals__.get(name) for name in value.__code__.co_names)
        yield from (variable for variable in variables if isinstance(variable, torch.nn.Module))
    elif not isinstance(value, type | ModuleType | torch.Tensor):
        yield from object.__getattribute__(value, "__dict__").values()


def _has_fields(value: Any) -> bool:
    return bool(type(value).__dictoffset__) or isinstance(value, list | tuple | dict | MethodType)


def note_module(record: Cells, module: torch.nn.Module) -> None:
    """Remember a module's state for `put_back`, before the code changes it for the first time."""
    if id(module) not in record.modules:
        record.modules[id(module)] = module, _held(vars(module))
        for table in _TABLES:
            for tensor in vars(module).get(table, {}).values():
                if tensor is not None and not isinstance(tensor, Tracer):
                    data, needs_grad = tensor.detach(), tensor.requires_grad
                    state = type(tensor), data, _held(vars(tensor))
                    record.undo.append(partial(_reset, tensor, *state, requires_grad=needs_grad))


def note_data(record: Cells, tensor: torch.Tensor) -> None:
    """Remember a tensor's data for `put_back`, before the code replaces it or makes the tensor another view."""
    with torch._C.DisableTorchFunction():  # an uninitialised parameter would refuse `detach`
        record.undo.append(partial(_set_data, tensor, tensor.detach()))


def _set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    tensor.data = data


def put_back(record: Cells) -> None:
    """Restore modules, parameters and buffers at the end of a recording."""
    with torch.no_grad(), torch._C.DisableTorchFunction(), ExitStack() as stack:
        for module, before in record.modules.values():
            stack.callback(_restore, module, before)
        for undo in record.undo:
            stack.callback(undo)  # called in reverse order, also after one that failed


# Attributes of an object, and copies of the containers among them, which hold hooks, parameters and submodules.

Held = dict[str, tuple[Any, Any]]


def _held(attributes: Mapping[str, Any]) -> Held:
    """Return pairs by attribute name: the attribute's value, and a copy of it if it is a container, else None."""
    return {name: (value, _copied(value)) for name, value in attributes.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(value)
    return type(value)(value) if type(value) in (list, set) else None


def _restore(module: torch.nn.Module, before: Held) -> None:
    present = vars(module)
    if "_parameters" not in before:  # the code created the module: it had no state before
        for table in (present, *(present[name] for name in _TABLES if name in present)):
            for name in [name for name, value in table.items() if isinstance(value, Tracer)]:
                del table[name]
        return
    for value, copy in before.values():
        if isinstance(value, dict):
            _refill(value, copy)
        elif copy is not None and [*map(id, value)] != [*map(id, copy)]:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(copy)
    _refill(present, {name: value for name, (value, _) in before.items()})


def _refill(table: dict[Any, Any], before: Mapping[Any, Any]) -> None:
    """Restore a dict's items. If the order of keys is intact, unchanged items stay: other threads may read them."""
    for key in [key for key in table if key not in before]:
        del table[key]
    changed = {key: value for key, value in before.items() if key not in table or table[key] is not value}
    is_in_order = all(map(is_, table, before))
    for key, value in changed.items() if is_in_order else before.items():
        if not is_in_order:
            table.pop(key, None)
        table[key] = value


def _reset(tensor: torch.Tensor, kind: type, data: torch.Tensor, before: Held, *, requires_grad: bool) -> None:
    """Restore a parameter's or buffer's class, attributes and `requires_grad`, and its data if it became a tracer."""
    if isinstance(tensor, Tracer):
        swap(tensor, data)
    if type(tensor) is not kind:
        tensor.__class__ = kind
    _refill(vars(tensor), {name: value for name, (value, _) in before.items()})
    if tensor.requires_grad is not requires_grad:
        tensor.requires_grad_(requires_grad)

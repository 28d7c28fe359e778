"""A module's tensors by the names that `load_state_dict` looks for, and by stored key, each memory once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from ...core.mapping import is_wrapper
from ...core.trees import holds_tensors
from ...errors import KeyMismatch, error_text
from ._convert import local_tensor

Tensors = dict[str, torch.Tensor]


class UnreadValue(NamedTuple):
    """A stored value that isn't read yet.

    Attributes:
        key: Stored key.
        shape: Shape of a tensor; None for any other value.
        common: Whether the value belongs to the common state, which has been read.
    """

    key: str
    shape: tuple[int, ...] | None
    common: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Fill:
    """A stored tensor that goes into a module's tensor.

    Attributes:
        name: Name of the tensor in `load_state_dict`.
        tensor: Parameter or buffer of the module.
        stored: Stored value that goes into it.
    """

    name: str
    tensor: torch.Tensor
    stored: UnreadValue


def own_tensors(module: torch.nn.Module, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a module's own parameters and persistent buffers by name, without those of its children."""
    transient = module._non_persistent_buffers_set
    buffers = ((name, buffer) for name, buffer in module._buffers.items() if name not in transient)
    for name, tensor in (*module._parameters.items(), *buffers):
        if tensor is not None:
            yield f"{prefix}{name}", tensor


def all_tensors(module: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and persistent buffers of a module and its children, by all of their names."""
    yield from own_tensors(module, prefix)
    for name, child in module._modules.items():
        if child is not None:
            yield from all_tensors(child, f"{prefix}{name}.")


# Stored values by the names that a module's hooks and `load_state_dict` know them by


def stored_by_name(
    keys: Mapping[str, str], key: Callable[[str], str], stored: Mapping[str, UnreadValue], hooked: Iterable[str]
) -> dict[str, UnreadValue]:
    """Return the stored values by the names of a module's state dict.

    Args:
        keys: Stored key of each known name.
        key: Function from a name to its stored key.
        stored: Stored values, by key.
        hooked: Prefixes of modules whose hooks may know further names.
    """
    if key is str:
        return dict(stored)
    named = {name: stored[each] for name, each in keys.items() if each in stored}
    spare = stored.keys() - set(keys.values())
    for prefix in hooked:
        # A function of names has no inverse. What comes before a module's names is found by those that are known.
        own = ((name[len(prefix) :], keys[name]) for name in keys if name.startswith(prefix))
        before = {each.removesuffix(local) for local, each in own if each.endswith(local)}
        for start in before:
            tails = ((f"{prefix}{each.removeprefix(start)}", each) for each in spare if each.startswith(start))
            named |= {name: stored[each] for name, each in tails if name not in named and _has_key(key, name, each)}
    return named


def _has_key(key: Callable[[str], str], name: str, stored_key: str) -> bool:
    with suppress(Exception):  # it may be a table of the known names
        return key(name) == stored_key
    return False


# Tensors by stored key


@dataclass(frozen=True, slots=True, eq=False)
class Named:
    """A module's tensors by stored key.

    Attributes:
        targets: each memory once, by the first of its keys.
        aliases: tensors with more stored keys, by the others.
        copies: pairs of a tensor and another one of other memory that has the same key.
    """

    targets: Tensors
    aliases: Tensors
    copies: list[tuple[torch.Tensor, torch.Tensor]]


def by_stored_key(fills: Iterable[Fill]) -> Named:
    """Return the tensors that are filled, by stored key.

    Raises:
        KeyMismatch: tensors that differ have one stored key.
    """
    names: dict[Any, list[str]] = {}
    keys: dict[Any, list[str]] = {}
    tensors: dict[Any, torch.Tensor] = {}
    for fill in fills:
        memory = _memory_of(fill.tensor)
        tensors.setdefault(memory, fill.tensor.detach())
        names.setdefault(memory, []).append(fill.name)
        keys.setdefault(memory, []).append(fill.stored.key)
    return _sort_out({memory: [*dict.fromkeys(each)] for memory, each in keys.items()}, tensors, names)


def _sort_out(
    stored_keys: Mapping[Any, list[str]], tensors: Mapping[Any, torch.Tensor], names: Mapping[Any, list[str]]
) -> Named:
    """Return the tensors to fill, those to compare with them, and the copies to make, from memories and stored keys."""
    targets, aliases, copies = Tensors(), Tensors(), list[tuple[torch.Tensor, torch.Tensor]]()
    holder: dict[str, Any] = {}
    for number, keys in stored_keys.items():
        before = [name for name in keys if name in holder]
        free = [name for name in keys if name not in holder]
        if before:
            source = holder[before[0]]
            _refuse_unlike(before[0], {names[source][0]: tensors[source], names[number][0]: tensors[number]})
            copies.append((tensors[source], tensors[number]))
        else:
            targets[free.pop(0)] = tensors[number]
        aliases |= dict.fromkeys(free, tensors[number])
        holder |= dict.fromkeys([name for name in keys if name not in holder], number)
    return Named(targets, aliases, copies)


def _refuse_unlike(key: str, tensors: Tensors) -> None:
    """Raise unless what is stored for one of two tensors can be copied to the other, as each rank holds them."""
    kinds = []
    for tensor in tensors.values():
        local, cut = local_tensor(tensor), (getattr(tensor, name, None) for name in ("device_mesh", "placements"))
        kinds.append((tensor.shape, local.shape, local.stride(), local.dtype, *cut))
    if kinds[0] != kinds[1]:
        what = f"load_module: key= returns {key!r} for tensors that differ in shape, dtype or placements"
        found = " and ".join(f"{tuple(each.shape)} {each.dtype}" for each in tensors.values())
        fix = "Return a stored key of its own for each."
        raise KeyMismatch(error_text(what, offenders=[*tensors], found=found, expected="tensors alike", fix=fix))


# What isn't filled


def unfilled(tensors: Tensors, missing: Iterable[str], keys: Mapping[str, str]) -> dict[str, str]:
    """Return the stored keys of missing names, by one of the names; a tensor that has other names is filled by them.

    Args:
        tensors: the module's tensors by all of their names.
        missing: names that aren't stored.
        keys: stored keys by name.
    """
    absent = dict.fromkeys(missing)
    names: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(_memory_of(tensor), []).append(name)
    groups = {name: group for group in names.values() for name in group}
    lacking = {name: groups.get(name, [name]) for name in absent}
    return {
        group[0]: " = ".join(dict.fromkeys(keys.get(each, each) for each in group))
        for group in lacking.values()
        if all(each in absent for each in group)
    }


def has_elements(value: Any) -> bool:
    """Return whether a value holds tensors; a tensor without elements, as an empty extra state is, doesn't count."""
    return holds_tensors(value) and not (isinstance(value, torch.Tensor) and not is_lazy(value) and not value.numel())


def overlapping(tensors: Tensors) -> list[str]:
    """Return the keys of plain tensors that share a storage with another one."""
    places: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if not hasattr(tensor, "placements") and tensor.numel() and not is_wrapper(tensor):
            places.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return [name for names in places.values() if len(names) > 1 for name in names]


def _memory_of(tensor: torch.Tensor) -> Any:
    """Return an identity that two parameters share if they are one object, or the same view of one memory."""
    is_apart = hasattr(tensor, "placements") or is_lazy(tensor) or tensor.is_meta or is_wrapper(tensor)
    if is_apart or tensor.layout is not torch.strided:
        return id(tensor)
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else id(tensor)

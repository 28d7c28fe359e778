"""A module's tensors by name in `load_state_dict`; and by stored key, where tied tensors count as one tensor."""

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
        name: Key of the tensor in the state dict that `load_state_dict` takes.
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
    """Return the stored values by the names that they have in a module's state dict.

    Args:
        keys: Stored key of each name in the module's `state_dict`, and of tensors that a hook leaves out of it.
        key: Function from a name to its stored key.
        stored: Stored values, by stored key.
        hooked: Prefixes of the names of modules with hooks; a hook may look for names that aren't in `keys`.
    """
    if key is str:
        return dict(stored)
    named = {name: stored[stored_key] for name, stored_key in keys.items() if stored_key in stored}
    spare = stored.keys() - set(keys.values())
    for prefix in hooked:
        # `key` has no inverse. The stored counterparts of a module's prefix are found by its known names.
        known = ((name[len(prefix) :], keys[name]) for name in keys if name.startswith(prefix))
        stored_prefixes = {stored_key.removesuffix(local) for local, stored_key in known if stored_key.endswith(local)}
        for start in stored_prefixes:
            pairs = ((f"{prefix}{name.removeprefix(start)}", name) for name in spare if name.startswith(start))
            new = ((name, stored_key) for name, stored_key in pairs if name not in named)
            named |= {name: stored[stored_key] for name, stored_key in new if _has_key(key, name, stored_key)}
    return named


def _has_key(key: Callable[[str], str], name: str, stored_key: str) -> bool:
    with suppress(Exception):  # `key` may be a table of the known names alone
        return key(name) == stored_key
    return False


# Tensors by stored key


@dataclass(frozen=True, slots=True, eq=False)
class Named:
    """A module's tensors in three groups: to fill, to compare, and to copy to.

    Tied tensors share memory and count as one tensor, which may have several stored keys. Conversely, several tensors
    in different memory may have the same stored key.

    Attributes:
        targets: Tensors to fill, by their first stored key.
        aliases: Tied tensors, by each further stored key. The values stored there are only compared.
        copies: Pairs ``(filled, other)`` of tensors in different memory with the same stored key: the first is copied
            to the second.
    """

    targets: Tensors
    aliases: Tensors
    copies: list[tuple[torch.Tensor, torch.Tensor]]


def by_stored_key(fills: Iterable[Fill]) -> Named:
    """Group a load's tensors by what is done with them: fill, compare, or copy.

    Tensors in the same memory (tied weights) are filled once. If they have several stored keys, the values under the
    further keys are compared. If tensors in different memory have one stored key, one is filled, and the others get
    copies.

    Raises:
        KeyMismatch: Tensors that differ in shape, dtype or placements have the same stored key.
    """
    names: dict[Any, list[str]] = {}
    keys: dict[Any, list[str]] = {}
    tensors: dict[Any, torch.Tensor] = {}
    for fill in fills:
        memory = _memory_of(fill.tensor)
        tensors.setdefault(memory, fill.tensor.detach())
        names.setdefault(memory, []).append(fill.name)
        keys.setdefault(memory, []).append(fill.stored.key)
    return _sort_out({memory: [*dict.fromkeys(of_memory)] for memory, of_memory in keys.items()}, tensors, names)


def _sort_out(
    stored_keys: Mapping[Any, list[str]], tensors: Mapping[Any, torch.Tensor], names: Mapping[Any, list[str]]
) -> Named:
    """Return the tensors to fill, the aliases to compare and the copies to make.

    All arguments are dicts by the tensors' identities, as `_memory_of` returns them.

    Args:
        stored_keys: Stored keys of each tensor.
        tensors: Tensors to fill.
        names: Names of each tensor in `load_state_dict`.
    """
    targets, aliases, copies = Tensors(), Tensors(), list[tuple[torch.Tensor, torch.Tensor]]()
    holder: dict[str, Any] = {}
    for memory, keys in stored_keys.items():
        taken = [key for key in keys if key in holder]
        free = [key for key in keys if key not in holder]
        if taken:
            source = holder[taken[0]]
            _refuse_unlike(taken[0], {names[source][0]: tensors[source], names[memory][0]: tensors[memory]})
            copies.append((tensors[source], tensors[memory]))
        else:
            targets[free.pop(0)] = tensors[memory]
        aliases |= dict.fromkeys(free, tensors[memory])
        holder |= dict.fromkeys([key for key in keys if key not in holder], memory)
    return Named(targets, aliases, copies)


def _refuse_unlike(key: str, tensors: Tensors) -> None:
    """Raise KeyMismatch unless two tensors with the same stored key have equal shapes, dtypes and placements.

    Only then can each rank copy its part of the first tensor to its part of the second.

    Args:
        key: Stored key of both tensors.
        tensors: The two tensors, by name.
    """
    kinds = []
    for tensor in tensors.values():
        local, cut = local_tensor(tensor), (getattr(tensor, name, None) for name in ("device_mesh", "placements"))
        kinds.append((tensor.shape, local.shape, local.stride(), local.dtype, *cut))
    if kinds[0] != kinds[1]:
        heading = f"load_module: key= returns {key!r} for tensors that differ in shape, dtype or placements"
        found = " and ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors.values())
        expected, fix = "equal shapes, dtypes and placements", "Return a different stored key for each."
        raise KeyMismatch(error_text(heading, offenders=[*tensors], found=found, expected=expected, fix=fix))


# What isn't filled


def unfilled(tensors: Tensors, missing: Iterable[str], keys: Mapping[str, str]) -> dict[str, str]:
    """Return the module's tensors that are stored under none of their names.

    The result maps one name of each such tensor to a text with the keys that were looked for. The text for a tensor
    with several names may have several keys, such as "a = b".

    Args:
        tensors: The module's tensors by all of their names.
        missing: Names that aren't stored.
        keys: Key to look for in the checkpoint, by name.
    """
    absent = dict.fromkeys(missing)
    names: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(_memory_of(tensor), []).append(name)
    groups = {name: group for group in names.values() for name in group}
    lacking = {name: groups.get(name, [name]) for name in absent}
    return {
        group[0]: " = ".join(dict.fromkeys(keys.get(name, name) for name in group))
        for group in lacking.values()
        if all(name in absent for name in group)
    }


def has_elements(value: Any) -> bool:
    """Return whether a value holds tensors; a tensor without elements, such as an empty extra state, doesn't count."""
    return holds_tensors(value) and not (isinstance(value, torch.Tensor) and not is_lazy(value) and not value.numel())


def overlapping(tensors: Tensors) -> list[str]:
    """Return the keys of plain tensors that share a storage with another plain tensor."""
    places: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if not hasattr(tensor, "placements") and tensor.numel() and not is_wrapper(tensor):
            places.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return [name for names in places.values() if len(names) > 1 for name in names]


def _memory_of(tensor: torch.Tensor) -> Any:
    """Return a hashable identity, which tensors share if they are the same view of the same memory.

    For DTensors, and tensors without plain memory or without elements, it is the identity of the tensor object.
    """
    is_apart = hasattr(tensor, "placements") or is_lazy(tensor) or tensor.is_meta or is_wrapper(tensor)
    if is_apart or tensor.layout is not torch.strided:
        return id(tensor)
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else id(tensor)

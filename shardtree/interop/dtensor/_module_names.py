"""What of a module is filled by which stored key: its tensors, each memory once, and what goes through its hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import KeyMismatch, UnsupportedValue, error_text
from ...mapping import is_wrapper, without_shape
from ...trees import holds_tensors
from ._convert import local_tensor

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Named:
    """A module's tensors by stored key.

    Attributes:
        targets: each once, by the first of its keys that is stored.
        aliases: those with more stored keys, by the others.
        copies: tensors of other memory that have a key of these too, each after the one it is copied from.
        others: of entries that are neither parameters nor buffers and are stored, the key by name in `state_dict`.
        dtypes: those of entries that are neither parameters nor buffers, but tensors, by key.
        absent: of parameters that `state_dict` leaves out, the key by name.
        missing: the keys of what holds tensors, without any that is stored; and of what is absent, if there are no
            others, through which hooks may fill it.
        kept: those of other entries that aren't stored.
    """

    targets: Tensors
    aliases: Tensors
    copies: list[tuple[torch.Tensor, torch.Tensor]]
    others: dict[str, str]
    dtypes: dict[str, torch.dtype]
    absent: dict[str, str]
    missing: tuple[str, ...]
    kept: tuple[str, ...]


def by_stored_key(
    module: torch.nn.Module,
    state: Mapping[str, Any],
    key: Callable[[str], str],
    is_tensor: Mapping[str, bool],
    plain: Mapping[str, Any],
) -> Named:
    """Return a module's tensors by stored key.

    Args:
        module: with memory.
        state: its `state_dict`.
        key: returns the stored key for a name.
        is_tensor: whether what is stored is a tensor, by key; else it is an object.
        plain: of the common state, whose tensors count for plain ones.

    Raises:
        UnsupportedValue: a tensor is on the meta device, or isn't initialised yet.
        KeyMismatch: tensors that differ have one stored key.
    """
    _refuse_shapeless(state)
    own = set(map(id, (*module.parameters(), *module.buffers())))
    names: dict[Any, list[str]] = {}
    for name, value in state.items():
        if id(value) in own:
            names.setdefault(_memory_of(value), []).append(name)
    rest = {name: value for name, value in state.items() if id(value) not in own}
    tensors = {number: state[each[0]].detach() for number, each in names.items()}
    _refuse_meta([names[number][0] for number, tensor in tensors.items() if tensor.is_meta])

    def has(tensor: torch.Tensor, name: str) -> bool:
        in_common = isinstance(plain.get(name), torch.Tensor) and not hasattr(tensor, "placements")
        return is_tensor.get(name, False) or in_common

    keys = {number: [*dict.fromkeys(map(key, each))] for number, each in names.items()}
    stored_keys = {number: [name for name in each if has(tensors[number], name)] for number, each in keys.items()}
    missing = {" = ".join(keys[number]) for number, each in stored_keys.items() if not each}
    targets, aliases, copies = _sort_out({number: each for number, each in stored_keys.items() if each}, tensors, names)
    others = {name: key(name) for name in rest if key(name) in is_tensor or key(name) in plain}
    missing |= {key(name) for name, value in rest.items() if name not in others and _has_elements(value)}
    kept = {key(name) for name in rest if name not in others} - missing
    ids = {*map(id, state.values())}
    parameters = module.named_parameters(remove_duplicate=False)
    absent = {name: key(name) for name, each in parameters if id(each) not in ids and name not in state}
    missing |= set() if others else {*absent.values()}
    dtypes = {key(name): value.dtype for name, value in rest.items() if isinstance(value, torch.Tensor)}
    return Named(targets, aliases, copies, others, dtypes, absent, tuple(sorted(missing)), tuple(sorted(kept)))


def _sort_out(
    stored_keys: Mapping[Any, list[str]], tensors: Mapping[Any, torch.Tensor], names: Mapping[Any, list[str]]
) -> tuple[Tensors, Tensors, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return what is filled, what is compared with it, and what is copied, of memories by their stored keys."""
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
    return targets, aliases, copies


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


def _refuse_shapeless(state: Mapping[str, Any]) -> None:
    lazy = [f"{name!r}: {kind}" for name, value in state.items() if (kind := without_shape(value))]
    if lazy:
        fix = "Run a module with lazy parameters once before."
        raise UnsupportedValue(error_text("load_module: tensors without a shape", offenders=lazy, fix=fix))


def _refuse_meta(names: Sequence[str]) -> None:
    if names:
        fix = "Call module.to_empty(device=...) first, and set the buffers that state_dict leaves out."
        raise UnsupportedValue(error_text("load_module: tensors without memory (meta)", offenders=names, fix=fix))


def _has_elements(value: Any) -> bool:
    """Return whether a value holds tensors; a tensor without elements, as an empty extra state is, doesn't count."""
    return holds_tensors(value) and not (isinstance(value, torch.Tensor) and not value.numel())


def overlapping(tensors: Tensors) -> list[str]:
    """Return the keys of plain tensors that share a storage with another one."""
    places: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if not hasattr(tensor, "placements") and tensor.numel() and not is_wrapper(tensor):
            places.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return [name for names in places.values() if len(names) > 1 for name in names]


def _memory_of(tensor: torch.Tensor) -> Any:
    """Return what is equal for two parameters that are one tensor: the same object, or the same view of one memory."""
    is_apart = hasattr(tensor, "placements") or tensor.is_meta or is_wrapper(tensor)
    if is_apart or not tensor.numel() or tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype

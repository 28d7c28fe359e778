"""`load_module`: a checkpoint's tensors go into a module's parameters and buffers by their names, however it is cut."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..._shielded import shielded
from ...checkpoint import load, load_common_state_dict, load_tensors_metadata
from ...errors import IntegrityError, KeyMismatch, ShapeError, UnsafeFile, UnsupportedValue, error_text
from ...mapping import ShardedTensor
from ...storage import Directory
from ...strategies import LoadOptions, Strategies
from ...trees import leaves_with_paths, map_data, path_key
from ...world import World, agree, current_world, on_rank_zero
from ._convert import from_dtensors, local_tensor
from ._placed import Strided


@dataclass(frozen=True, slots=True)
class ModuleKeys:
    """What of a module and a checkpoint has no counterpart.

    Attributes:
        missing: the module's tensors that aren't stored, by stored key, sorted; they keep their values.
        unused: stored keys that the module has no name for, sorted.
        kept: entries of its `state_dict` that are neither parameters nor buffers and aren't stored, by key, sorted.
    """

    missing: tuple[str, ...]
    unused: tuple[str, ...]
    kept: tuple[str, ...] = ()


Tensors = dict[str, torch.Tensor]


@shielded
def load_module(
    module: torch.nn.Module,
    checkpoint_dir: Directory,
    *,
    key: Callable[[str], str] = str,
    strict: bool = True,
    cast: bool = False,
    world: Any = None,
    within: Any = None,
    strided: Strided = None,
    strategies: Strategies | None = None,
    options: LoadOptions | None = None,
) -> ModuleKeys:
    """Fill a module's parameters and buffers in place; every rank calls it with its own part of the module.

    The module may be cut by FSDP2, tensor parallelism or `distribute_tensor`, and the checkpoint may be in any format
    and layout, such as a Hugging Face model's folder. Each rank reads the bytes of its own part. Several names of one
    tensor (tied weights) need one stored tensor; where more are stored, they have to be equal. What isn't stored as a
    tensor of its own is looked for in the common state, where plain buffers may be. What of `state_dict` is neither a
    parameter nor a buffer (extra states, a quantised layer's scales, what a hook has changed) goes through the module's
    own `load_state_dict`. Buffers that `state_dict` leaves out (``persistent=False``) keep their values. If it fails,
    what the module holds is lost.

    Args:
        module: with memory on any device: after ``module.to_empty(device=...)`` if it was made on the meta device, and
            with its weights tied again, which that takes apart.
        checkpoint_dir: a path or URL that all ranks see, or a `Storage`.
        key: returns the stored key for a name of the module's `state_dict`; by default they are the same.
        strict: whether a tensor that isn't stored is an error. If False, it keeps its values; its key is returned.
        cast: whether what is stored in another dtype is converted, as `load` does; else it is an error.
        world: the ranks that take part; torch.distributed's default group, or else this process alone.
        within: the DeviceMesh whose ranks all hold this module, as for `from_dtensors`. Plain tensors are taken to be
            whole on each rank.
        strided: the meaning of a `_StridedShard`, as for `from_dtensors`.
        strategies: the dispatch table; None for the process's.
        options: how it is read.

    Returns:
        The keys that only one of the two has.

    Raises:
        KeyMismatch: a tensor has no name that is stored, and `strict` is True.
        UnsupportedValue: the module is on the meta device.
        IntegrityError: a tensor's several names are stored with different values.
        CheckpointingException: what `load` raises.

    Examples:
        >>> import tempfile, shardtree as st
        >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(2, 1)
        >>> tree = {"weight": torch.ones(1, 2), "bias": torch.zeros(1), "more": torch.zeros(3)}
        >>> st.save({key: st.ShardedTensor.from_rank_offsets(key, data) for key, data in tree.items()}, folder)
        >>> load_module(model, folder)
        ModuleKeys(missing=(), unused=('more',))
        >>> model.weight.data
        tensor([[1., 1.]])
    """
    ranks = current_world(world)
    listed = partial(load_tensors_metadata, checkpoint_dir, strategies=strategies, options=options)
    stored = on_rank_zero(ranks, "load_module: list what is stored", lambda: sorted(listed()))

    def target_of() -> tuple[_Named, dict[str, Any], Any]:
        wanted = {key(name) for name in module.state_dict(keep_vars=True)} - {*stored}
        plain = _plain_values(checkpoint_dir, wanted, strategies, options)
        named = _by_stored_key(module, key, {*stored}, plain)
        if strict:
            _refuse_missing(named.missing, stored)
        replicated = None if within is None else lambda *_: True
        own = {name: tensor for name, tensor in (named.filled | named.aliases).items() if name not in plain}
        shards = from_dtensors(own, within=within, strided=strided, replicated=replicated)
        target = {name: _whole(name, leaf, ranks) for name, leaf in shards.items()}
        # Only to be compared: the first name fills the memory. Views of one memory are filled one after the other.
        apart = {*named.aliases, *_overlapping(named.filled)}
        target |= {name: map_data(torch.empty_like, target[name]) for name in apart if name in target}
        others = {name for name in named.others.values() if name not in plain}
        whole = listed() if others else {}
        return named, plain, target | {name: replace(whole[name], replica_id=ranks.rank) for name in others}

    named, plain, target = agree(ranks, "load_module: find names", target_of)
    loaded = load(target, checkpoint_dir, world=ranks, donate=True, cast=cast, strategies=strategies, options=options)
    agree(ranks, "load_module: compare tied tensors", partial(_fill, named, plain | loaded, cast=cast))
    agree(ranks, "load_module: load the rest", partial(_load_others, module, named, plain | loaded))
    used = {*named.filled, *named.aliases, *named.others.values()}
    return ModuleKeys(named.missing, tuple(name for name in stored if name not in used), named.kept)


@dataclass(frozen=True, slots=True, eq=False)
class _Named:
    """A module's tensors by stored key.

    Attributes:
        filled: each once, by the first of its keys that is stored.
        aliases: those with more stored keys, by the others.
        others: of entries that are neither parameters nor buffers and are stored, the key by name in `state_dict`.
        missing: the keys of tensors without any that is stored.
        kept: those of other entries that aren't.
    """

    filled: Tensors
    aliases: Tensors
    others: dict[str, str]
    missing: tuple[str, ...]
    kept: tuple[str, ...]


def _refuse_missing(missing: tuple[str, ...], stored: Sequence[str]) -> None:
    if missing:
        found = f"{len(stored)} keys, such as {', '.join(stored[:3])}"
        fix = "Map names to stored keys by key=, tie weights that to_empty() took apart, or pass strict=False."
        error = KeyMismatch(error_text("load_module: not stored", offenders=missing, found=found, fix=fix))
        error.unexpected = missing
        raise error


def _plain_values(
    where: Directory, wanted: Collection[str], strategies: Strategies | None, options: LoadOptions | None
) -> dict[str, Any]:
    """Return the values of the common state that have these keys; none where reading it takes pickled code."""
    if not wanted:
        return {}
    with suppress(UnsafeFile, UnsupportedValue):
        leaves = leaves_with_paths(load_common_state_dict(where, strategies=strategies, options=options))
        return {name: leaf for path, leaf in leaves if (name := path_key(path)) in wanted}
    return {}


def _fill(named: _Named, loaded: Mapping[str, Any], *, cast: bool) -> None:
    """Put what isn't in a tensor's memory yet there, and raise where its other stored keys have other values."""
    for name, tensor in named.filled.items():
        local = local_tensor(tensor)
        # Several boxes were put together, elsewhere. A rank that a tensor's mesh doesn't have holds nothing of it.
        if name not in loaded or loaded[name].data_ptr() == local.data_ptr():
            continue
        if loaded[name].shape != local.shape or (loaded[name].dtype != local.dtype and not cast):
            found, expected = (f"{tuple(one.shape)} {one.dtype}" for one in (loaded[name], local))
            raise ShapeError(error_text(f"load_module: {name!r} doesn't fit", found=found, expected=expected))
        local.copy_(loaded[name])
    apart = named.aliases | {name: named.filled[name] for name in _overlapping(named.filled)}
    held = {name: local_tensor(tensor) for name, tensor in apart.items() if name in loaded}
    differing = [name for name, local in held.items() if not torch.equal(loaded[name], local)]
    if differing:
        what, fix = "load_module: names of one tensor are stored with different values", "Untie them in the module."
        raise IntegrityError(error_text(what, offenders=differing, fix=fix))


def _load_others(module: torch.nn.Module, named: _Named, loaded: Mapping[str, Any]) -> None:
    """Give the module's own hooks what is neither a parameter nor a buffer of it."""
    values = {name: loaded[stored] for name, stored in named.others.items()}
    if not values:
        return
    try:
        module.load_state_dict(values, strict=False)
    except RuntimeError as error:
        what = "load_module: the module's own load_state_dict refuses what is stored"
        raise ShapeError(error_text(what, offenders=sorted(values), found=str(error))) from error


def _overlapping(tensors: Tensors) -> list[str]:
    """Return the keys of plain tensors that share a storage with another one."""
    places: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if not hasattr(tensor, "placements") and tensor.numel():
            places.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return [name for names in places.values() if len(names) > 1 for name in names]


def _by_stored_key(
    module: torch.nn.Module, key: Callable[[str], str], stored: Collection[str], plain: Mapping[str, Any]
) -> _Named:
    """Return a module's tensors by stored key: those of the common state count for plain tensors."""
    names: dict[Any, list[str]] = {}
    tensors: dict[Any, torch.Tensor] = {}
    others: dict[str, str] = {}
    own = set(map(id, (*module.parameters(), *module.buffers())))
    for name, value in module.state_dict(keep_vars=True).items():
        if id(value) not in own:
            others[name] = key(name)
            continue
        names.setdefault(_memory_of(value), []).append(key(name))
        tensors[_memory_of(value)] = value
    made = [names[number][0] for number, tensor in tensors.items() if tensor.is_meta]
    if made:
        fix = "Call module.to_empty(device=...) first, and set the buffers that state_dict leaves out."
        raise UnsupportedValue(error_text("load_module: tensors without memory (meta)", offenders=made, fix=fix))

    def has(tensor: torch.Tensor, name: str) -> bool:
        return name in stored or (isinstance(plain.get(name), torch.Tensor) and not hasattr(tensor, "placements"))

    found = {number: [name for name in each if has(tensors[number], name)] for number, each in names.items()}
    missing = tuple(sorted(" = ".join(names[number]) for number, known in found.items() if not known))
    found = {number: known for number, known in found.items() if known}
    return _Named(
        {known[0]: tensors[number].detach() for number, known in found.items()},
        {name: tensors[number].detach() for number, known in found.items() for name in known[1:]},
        {name: one for name, one in others.items() if one in stored or one in plain},
        missing,
        tuple(sorted(one for one in others.values() if one not in stored and one not in plain)),
    )


def _memory_of(tensor: torch.Tensor) -> Any:
    """Return what is equal for two parameters that are one tensor: the same object, or the same view of one memory."""
    if hasattr(tensor, "placements") or tensor.is_meta or not tensor.numel() or tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _whole(key: str, leaf: Any, world: World) -> Any:
    """Return a plain tensor as a shard that each rank holds whole; other leaves unchanged."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return ShardedTensor.from_rank_offsets(key, leaf, replica_id=world.rank)

"""`load_module`: a checkpoint's tensors go into a module's parameters and buffers by their names, however it is cut."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..._shielded import shielded
from ...checkpoint import load, load_tensors_metadata
from ...errors import IntegrityError, KeyMismatch, UnsupportedValue, error_text
from ...mapping import ShardedTensor
from ...storage import Directory
from ...strategies import LoadOptions, Strategies
from ...trees import map_data
from ...world import World, agree, current_world, on_rank_zero
from ._convert import from_dtensors, local_tensor
from ._placed import Strided


@dataclass(frozen=True, slots=True)
class ModuleKeys:
    """What of a module and a checkpoint has no counterpart.

    Attributes:
        missing: the module's tensors that aren't stored, by stored key, sorted; they keep their values.
        unused: stored keys that the module has no name for, sorted.
    """

    missing: tuple[str, ...]
    unused: tuple[str, ...]


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
    tensor (tied weights) need one stored tensor; where more are stored, they have to be equal. Buffers that
    `state_dict` leaves out (``persistent=False``) keep their values. If it fails, what the module holds is lost.

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

    def target_of() -> tuple[Tensors, Tensors, tuple[str, ...], Any]:
        filled, aliases, missing = _by_stored_key(module, key, set(stored))
        if strict and missing:
            found = f"{len(stored)} keys, such as {', '.join(stored[:3])}"
            fix = "Map names to stored keys by key=, tie weights that to_empty() took apart, or pass strict=False."
            error = KeyMismatch(error_text("load_module: not stored", offenders=missing, found=found, fix=fix))
            error.unexpected = missing
            raise error
        replicated = None if within is None else lambda *_: True
        shards = from_dtensors(filled | aliases, within=within, strided=strided, replicated=replicated)
        target = {name: _whole(name, leaf, ranks) for name, leaf in shards.items()}
        # Only to be compared: the first name fills the memory.
        target |= {name: map_data(torch.empty_like, target[name]) for name in aliases if name in target}
        return filled, aliases, missing, target

    filled, aliases, missing, target = agree(ranks, "load_module: find names", target_of)
    loaded = load(target, checkpoint_dir, world=ranks, donate=True, cast=cast, strategies=strategies, options=options)

    agree(ranks, "load_module: compare tied tensors", partial(_fill, filled, aliases, loaded))
    return ModuleKeys(missing, tuple(name for name in stored if name not in filled and name not in aliases))


def _fill(filled: Tensors, aliases: Tensors, loaded: Mapping[str, torch.Tensor]) -> None:
    """Put what isn't in a tensor's memory yet there, and raise where its other stored keys have other values."""
    for name, tensor in filled.items():
        local = local_tensor(tensor)
        # Several boxes were put together, elsewhere. A rank that a tensor's mesh doesn't have holds nothing of it.
        if name in loaded and loaded[name].data_ptr() != local.data_ptr():
            local.copy_(loaded[name])
    held = {name: local_tensor(tensor) for name, tensor in aliases.items() if name in loaded}
    differing = [name for name, local in held.items() if not torch.equal(loaded[name], local)]
    if differing:
        what, fix = "load_module: names of one tensor are stored with different values", "Untie them in the module."
        raise IntegrityError(error_text(what, offenders=differing, fix=fix))


def _by_stored_key(
    module: torch.nn.Module, key: Callable[[str], str], stored: Collection[str]
) -> tuple[Tensors, Tensors, tuple[str, ...]]:
    """Return tensors by their first stored key, those with more stored keys by the others, and keys without any."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):  # extra states may be anything
            names.setdefault(id(value), []).append(key(name))
            tensors[id(value)] = value
    made = [names[number][0] for number, tensor in tensors.items() if tensor.is_meta]
    if made:
        fix = "Call module.to_empty(device=...) first, and set the buffers that state_dict leaves out."
        raise UnsupportedValue(error_text("load_module: tensors without memory (meta)", offenders=made, fix=fix))
    found = {number: [name for name in all_names if name in stored] for number, all_names in names.items()}
    missing = tuple(sorted(" = ".join(names[number]) for number, known in found.items() if not known))
    found = {number: known for number, known in found.items() if known}
    filled = {known[0]: tensors[number].detach() for number, known in found.items()}
    aliases = {name: tensors[number].detach() for number, known in found.items() for name in known[1:]}
    return filled, aliases, missing


def _whole(key: str, leaf: Any, world: World) -> Any:
    """Return a plain tensor as a shard that each rank holds whole; other leaves unchanged."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return ShardedTensor.from_rank_offsets(key, leaf, replica_id=world.rank)

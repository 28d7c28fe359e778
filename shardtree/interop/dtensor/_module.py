"""`load_module`: a checkpoint's tensors go into a module's parameters and buffers by their names, however it is cut."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch

from ...checkpoint import load, load_tensors_metadata
from ...errors import IntegrityError, KeyMismatch, UnsupportedValue, error_text
from ...mapping import ShardedTensor
from ...storage import Directory
from ...strategies import LoadOptions, Strategies
from ...trees import map_data
from ...world import World, agree, current_world, on_rank_zero
from ._convert import from_dtensors, local_tensor
from ._placed import Strided


def load_module(
    module: torch.nn.Module,
    checkpoint_dir: Directory,
    *,
    key: Callable[[str], str] = str,
    cast: bool = False,
    world: Any = None,
    within: Any = None,
    strided: Strided = None,
    strategies: Strategies | None = None,
    options: LoadOptions | None = None,
) -> tuple[str, ...]:
    """Fill a module's parameters and stored buffers in place; every rank calls it with its own part of the module.

    The module may be cut by FSDP2, tensor parallelism or `distribute_tensor`, and the checkpoint may be in any format
    and layout, such as a Hugging Face model's folder. Each rank reads the bytes of its own part. Several names of one
    tensor (tied weights) need one stored tensor; where more are stored, they have to be equal. Buffers that
    `state_dict` leaves out (``persistent=False``) keep their values. If it fails, what the module holds is lost.

    Args:
        module: with memory on any device: after ``module.to_empty(device=...)`` if it was made on the meta device, and
            with its weights tied again, which that takes apart.
        checkpoint_dir: a path or URL that all ranks see, or a `Storage`.
        key: returns the stored key for a name of the module's `state_dict`; by default they are the same.
        cast: whether what is stored in another dtype is converted, as `load` does; else it is an error.
        world: the ranks that take part; torch.distributed's default group, or else this process alone.
        within: the DeviceMesh whose ranks all hold this module, as for `from_dtensors`. Plain tensors are taken to be
            whole on each rank.
        strided: the meaning of a `_StridedShard`, as for `from_dtensors`.
        strategies: the dispatch table; None for the process's.
        options: how it is read.

    Returns:
        The stored keys that the module has no name for, sorted.

    Raises:
        KeyMismatch: a tensor has no name that is stored.
        UnsupportedValue: the module is on the meta device.
        IntegrityError: a tensor's several names are stored with different values.
        CheckpointingException: what `load` raises.

    Examples:
        >>> import tempfile, shardtree as st
        >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(2, 1)
        >>> tree = {"weight": torch.ones(1, 2), "bias": torch.zeros(1), "more": torch.zeros(3)}
        >>> st.save({key: st.ShardedTensor.from_rank_offsets(key, data) for key, data in tree.items()}, folder)
        >>> load_module(model, folder)
        ('more',)
        >>> model.weight.data
        tensor([[1., 1.]])
    """
    ranks = current_world(world)
    listed = partial(load_tensors_metadata, checkpoint_dir, strategies=strategies, options=options)
    stored = on_rank_zero(ranks, "load_module: list what is stored", lambda: sorted(listed()))

    def target_of() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Any]:
        filled, aliases = _by_stored_key(module, key, set(stored))
        replicated = None if within is None else lambda *_: True
        shards = from_dtensors(filled | aliases, within=within, strided=strided, replicated=replicated)
        target = {name: _whole(name, leaf, ranks) for name, leaf in shards.items()}
        return (
            filled,
            aliases,
            target | {name: map_data(torch.empty_like, target[name]) for name in aliases if name in target},
        )

    filled, aliases, target = agree(ranks, "load_module: find names", target_of)
    loaded = load(target, checkpoint_dir, world=ranks, donate=True, cast=cast, strategies=strategies, options=options)

    def put() -> None:
        for name, tensor in filled.items():
            local = local_tensor(tensor)
            if name in target and loaded[name].data_ptr() != local.data_ptr():  # several boxes were put together
                local.copy_(loaded[name])
        held = {name: local_tensor(tensor) for name, tensor in aliases.items() if name in target}
        differing = [name for name, local in held.items() if not torch.equal(loaded[name], local)]
        if differing:
            what, fix = "load_module: names of one tensor are stored with different values", "Untie them in the module."
            raise IntegrityError(error_text(what, offenders=differing, fix=fix))

    agree(ranks, "load_module: compare tied tensors", put)
    return tuple(name for name in stored if name not in filled and name not in aliases)


def _by_stored_key(
    module: torch.nn.Module, key: Callable[[str], str], stored: Collection[str]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return each tensor of a module by a stored key, and those that have more stored keys by the others."""
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
    lacking = [" = ".join(names[number]) for number, known in found.items() if not known]
    if lacking:
        near = f"{len(stored)} keys, such as {', '.join(sorted(stored)[:3])}"
        fix = "Map the module's names to stored keys by key=. Tie weights again where to_empty() took them apart."
        error = KeyMismatch(error_text("load_module: not stored", offenders=lacking, found=near, fix=fix))
        error.unexpected = tuple(sorted(lacking))
        raise error
    filled = {known[0]: tensors[number].detach() for number, known in found.items()}
    return filled, {name: tensors[number].detach() for number, known in found.items() for name in known[1:]}


def _whole(key: str, leaf: Any, world: World) -> Any:
    """Return a plain tensor as a shard that each rank holds whole; other leaves unchanged."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return ShardedTensor.from_rank_offsets(key, leaf, replica_id=world.rank)

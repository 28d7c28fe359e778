"""Reads of stored values into a module's tensors, or for hooks that ask for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import torch

from ...core.mapping import ShardedObject, ShardedTensor
from ...core.trees import HOLE, map_data, plain_matcher, refuse_scaled, scaled_values, those_of
from ...errors import IntegrityError, MetadataError, ShapeError, UnsafeFile, UnsupportedValue, error_text
from ...inspection import OpenCheckpoint, load_common_state_dict, load_sharded_metadata, open_checkpoint
from ...shell.checkpoint import load
from ...shell.storage import Directory
from ...shell.table import LoadOptions, Strategies
from ...shell.world import World, one_process
from ._convert import from_dtensors, local_tensor
from ._module_names import Fill, Named, UnreadValue, by_stored_key, overlapping
from ._placed import Strided, is_dtensor


@dataclass(frozen=True, eq=False)
class ModuleSource:
    """A checkpoint, and how to read it; the fields are arguments of `load_module`."""

    checkpoint_dir: Directory
    cast: bool
    plain: Sequence[str]
    within: Any
    strided: Strided
    strategies: Strategies | None
    options: LoadOptions | None

    @cached_property
    def tree(self) -> OpenCheckpoint:
        """The checkpoint, opened by this rank alone."""
        return open_checkpoint(self.checkpoint_dir, strategies=self.strategies, options=self.options)

    @cached_property
    def objects(self) -> Mapping[str, str]:
        """Mapping from the `key` of each stored object to its unique key, under which `tree.metadata` has it.

        If several objects have the same `key`, the last one counts.
        """
        return {shard.key: name for name, shard in self.tree.metadata.items() if isinstance(shard, ShardedObject)}


def stored_shapes(source: ModuleSource) -> dict[str, tuple[int, ...] | None]:
    """Return the shape of each stored tensor, and None for each stored object, by key.

    The objects of an array, which share a key, are left out.
    """
    shards = load_sharded_metadata(source.checkpoint_dir, strategies=source.strategies, options=source.options).values()
    tensors = {shard.key: shard.global_shape for shard in shards if isinstance(shard, ShardedTensor)}
    objects = (shard for shard in shards if not isinstance(shard, ShardedTensor))
    return {**dict.fromkeys(cell.key for cell in objects if prod(cell.global_shape) == 1), **tensors}


def common_values(
    source: ModuleSource, wanted: Callable[[str, Any], bool], stored_keys: Sequence[str]
) -> dict[str, Any]:
    """Return the wanted values of the common state, by key; none if the common state can't be read safely.

    Args:
        source: Checkpoint, and how to read it.
        wanted: Function that returns whether the value with a key is wanted.
        stored_keys: Keys of the tensors that are stored as shards. A dict or list with such a tensor in it is left out,
            as the common state has only a part of it.
    """
    with suppress(UnsafeFile, UnsupportedValue):
        tree = load_common_state_dict(source.checkpoint_dir, strategies=source.strategies, options=source.options)
        values = {name: value for name, value in _by_key(tree) if wanted(name, value)}
        # Containers are left out if some of their tensors are stored separately, and so are missing here.
        partial_names = {name for name in values if any(key.startswith(f"{name}.") for key in stored_keys)}
        return {
            name: value
            for name, value in values.items()
            if name not in partial_names or isinstance(value, torch.Tensor)
        }
    return {}


def _by_key(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value in nested dicts and lists with its path, joined by dots.

    Inner dicts and lists are yielded too, since an extra state may be one.
    """
    children = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    for entry, child in children:
        if child is not HOLE:
            yield f"{prefix}{entry}", child
            yield from _by_key(child, f"{prefix}{entry}.")


# Filling tensors


def target_of(source: ModuleSource, names: Named, common: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Return the target for `load`: this rank's shards of the tensors to fill, by stored key.

    Args:
        source: Checkpoint, and how to read it.
        names: Tensors to fill, and tied tensors whose stored values must be equal, by stored key.
        common: Values of the common state, by stored key; tensors with these keys aren't in the target.
        world: World of the ranks that load.

    Raises:
        MetadataError: The module has plain tensors, and this rank isn't in the mesh ``source.within``.
    """
    tensors = {name: tensor for name, tensor in (names.targets | names.aliases).items() if name not in common}
    replicated = None if source.within is None else lambda *_: True
    shards = from_dtensors(tensors, within=source.within, strided=source.strided, replicated=replicated)
    outside = [name for name, tensor in tensors.items() if name not in shards and not is_dtensor(tensor)]
    if outside:
        heading = "load_module: this rank has plain tensors, but is not in the mesh passed as within="
        found, expected = f"rank {source.within.get_rank()}", f"one of the mesh's ranks {source.within.mesh.tolist()}"
        fix = "Pass the mesh of the ranks that hold this module, such as its pipeline stage's."
        raise MetadataError(error_text(heading, offenders=outside, found=found, expected=expected, fix=fix))
    target = {
        # Each rank holds a plain tensor whole.
        name: ShardedTensor.from_rank_offsets(name, leaf, replica_id=world.rank)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for name, leaf in shards.items()
    }
    # Aliases are loaded only to be compared, since the first name fills the memory, and overlapping views are filled in
    # turn: both get memory of their own.
    apart = {*names.aliases, *overlapping(names.targets)}
    return target | {name: map_data(torch.empty_like, target[name]) for name in apart if name in target}


def loader_of(source: ModuleSource) -> Callable[..., Any]:
    """Return the function `load` with the arguments that a source gives: path, strategies and options."""
    return partial(
        load,
        checkpoint_dir=source.checkpoint_dir,
        donate=True,
        cast=source.cast,
        plain=source.plain,
        strategies=source.strategies,
        options=source.options,
    )


def fill_alone(source: ModuleSource, common: Mapping[str, Any], fills: Sequence[Fill]) -> None:
    """Fill tensors by a load of this rank alone, for a hook that may look at them before all ranks load together."""
    if not fills:
        return
    names, alone = by_stored_key(fills), one_process()
    target = target_of(source, names, common, alone)
    # Integrity isn't checked, since other ranks' parts aren't requested.
    values = loader_of(source)(target, world=alone, validate_access_integrity=False)
    deliver(names, {**common, **values}, cast=source.cast)


def deliver(names: Named, values: Mapping[str, Any], *, cast: bool) -> None:
    """Copy loaded values to tensors that weren't filled in place, and compare the values stored for tied tensors.

    Args:
        names: Tensors to fill, to compare and to copy to.
        values: Loaded local tensors, and values of the common state, by stored key.
        cast: Whether dtypes are converted.

    Raises:
        ShapeError: A value has another shape or dtype than its tensor.
        IntegrityError: Different values are stored for the names of one tensor.
    """
    for name, tensor in names.targets.items():
        local = local_tensor(tensor)
        # A part of several boxes was merged in other memory. A rank outside a tensor's mesh has no value for it.
        if name not in values or values[name].data_ptr() == local.data_ptr():
            continue
        _check_fits(name, values[name], local.shape, local.dtype, cast=cast)
        local.copy_(values[name])
    for source, tensor in names.copies:
        local_tensor(tensor).copy_(local_tensor(source))
    apart = names.aliases | {name: names.targets[name] for name in overlapping(names.targets)}
    tensors = {name: local_tensor(tensor) for name, tensor in apart.items() if name in values}
    differing = [name for name, local in tensors.items() if not torch.equal(values[name], local)]
    if differing:
        heading, fix = (
            "load_module: tied names, which share one tensor in the module, are stored with different values",
            "Untie these names in the module.",
        )
        raise IntegrityError(error_text(heading, offenders=differing, fix=fix))


def _check_fits(name: str, value: torch.Tensor, shape: torch.Size, dtype: torch.dtype, *, cast: bool) -> None:
    if value.shape != shape or (value.dtype != dtype and not cast):
        found, expected = f"{tuple(value.shape)} {value.dtype}", f"{tuple(shape)} {dtype}"
        fix = "If only the dtypes differ, pass cast=True."
        raise ShapeError(error_text(f"load_module: {name!r} does not fit", found=found, expected=expected, fix=fix))


# Values for hooks


def read_value(
    source: ModuleSource,
    common: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    dtypes: Mapping[str, torch.dtype],
    module: torch.nn.Module,
    name: str,
    stored: UnreadValue,
) -> Any:
    """Return the stored value that a module with hooks of its own asks for while it loads itself.

    The value for a parameter or buffer has the stored dtype. The value for any further tensor of `state_dict` is
    converted to that tensor's dtype. The value for a DTensor is a DTensor with the same placements. If the module has
    DTensors, further tensors are replicated on their mesh, since torch doesn't mix DTensors and plain tensors.

    Args:
        source: Checkpoint, and how to read it.
        common: Values of the common state, by stored key.
        tensors: Tensors that `load_state_dict` fills, by name.
        dtypes: Dtypes of the further tensors of `state_dict`, neither parameters nor buffers, by name.
        module: The module that asks.
        name: Name that the module asks for.
        stored: Stored value of that name.

    Raises:
        ShapeError: The stored dtype differs from the module's, and ``source.cast`` is False or the value needs scales.
    """
    if stored.shape is None:
        return common[stored.key] if stored.common else source.tree[source.objects[stored.key]].data
    like = tensors.get(name)
    lazy = common[stored.key] if stored.common else source.tree[stored.key].data
    expected = dtypes.get(name, lazy.dtype) if like is None else like.dtype
    if lazy.dtype != expected:
        _check_fits(stored.key, lazy, lazy.shape, expected, cast=source.cast)
        _refuse_without_scales(source, stored.key, lazy.dtype)
    if like is not None and is_dtensor(like) and like.shape == lazy.shape and not stored.common:
        part = torch.empty_like(like.detach(), dtype=lazy.dtype)
        fill_alone(source, common, [Fill(name, part, stored)])
        return part
    whole = lazy if stored.common else lazy.read()
    if like is not None and not is_dtensor(like):
        return whole
    return _replicated(module, whole if like is not None else whole.to(expected))


def _refuse_without_scales(source: ModuleSource, key: str, dtype: torch.dtype) -> None:
    """Raise ShapeError if a value can't be converted, since it is quantised and its scales are stored beside it.

    A value whose key matches ``source.plain`` isn't checked.
    """
    stored = source.tree.metadata
    if not plain_matcher("load_module", source.plain, stored.keys)(key):
        dtypes = those_of({name: shard.dtype for name, shard in stored.items() if isinstance(shard, ShardedTensor)})
        refuse_scaled("load_module", {key: dtype}, scaled_values({key: dtype}, dtypes))


def _replicated(module: torch.nn.Module, value: torch.Tensor) -> Any:
    """Return a tensor replicated on the mesh of a module's DTensors; unchanged if there isn't exactly one mesh."""
    direct = [*filter(is_dtensor, module.parameters(recurse=False))]
    dtensors: Any = direct or filter(is_dtensor, module.parameters())
    meshes: set[Any] = {dtensor.device_mesh for dtensor in dtensors}
    if len(meshes) != 1:
        return value
    from torch.distributed.tensor import DTensor, Replicate

    (mesh,) = meshes
    return DTensor.from_local(value.to(mesh.device_type), mesh, [Replicate()] * mesh.ndim, run_check=False)

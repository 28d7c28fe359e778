"""Stored values, read into a module's tensors or for hooks that ask for them."""

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
    """A checkpoint with the arguments of `load_module`, which are its fields."""

    checkpoint_dir: Directory
    cast: bool
    plain: Sequence[str]
    within: Any
    strided: Strided
    strategies: Strategies | None
    options: LoadOptions | None

    @cached_property
    def tree(self) -> OpenCheckpoint:
        """The open checkpoint, which this rank reads by itself."""
        return open_checkpoint(self.checkpoint_dir, strategies=self.strategies, options=self.options)

    @cached_property
    def objects(self) -> Mapping[str, str]:
        """The names in the open checkpoint of objects, by key; of cells with one key, one of them."""
        return {each.key: name for name, each in self.tree.metadata.items() if isinstance(each, ShardedObject)}


def stored_shapes(source: ModuleSource) -> dict[str, tuple[int, ...] | None]:
    """Return the shape of each stored tensor by key, and None for each object that is the only one of its key."""
    shards = load_sharded_metadata(source.checkpoint_dir, strategies=source.strategies, options=source.options).values()
    tensors = {each.key: each.global_shape for each in shards if isinstance(each, ShardedTensor)}
    objects = (each for each in shards if not isinstance(each, ShardedTensor))
    return {**dict.fromkeys(each.key for each in objects if prod(each.global_shape) == 1), **tensors}


def common_values(
    source: ModuleSource, wanted: Callable[[str, Any], bool], stored_keys: Sequence[str]
) -> dict[str, Any]:
    """Return the wanted values of the common state by key; none where reading it takes pickled code."""
    with suppress(UnsafeFile, UnsupportedValue):
        tree = load_common_state_dict(source.checkpoint_dir, strategies=source.strategies, options=source.options)
        values = {name: value for name, value in _by_key(tree) if wanted(name, value)}
        # Of a container whose tensors are stored by themselves only the rest is here.
        containers = {name for name in values if any(each.startswith(f"{name}.") for each in stored_keys)}
        return {n: each for n, each in values.items() if n not in containers or isinstance(each, torch.Tensor)}
    return {}


def _by_key(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what is in dicts and lists, and these too, by the keys of their paths: an extra state may be one."""
    children = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    for entry, child in children:
        if child is not HOLE:
            yield f"{prefix}{entry}", child
            yield from _by_key(child, f"{prefix}{entry}.")


# Filling tensors


def target_of(source: ModuleSource, names: Named, common: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Return the target of the load: this rank's shards, by stored key.

    Raises:
        MetadataError: The module has plain tensors, and this rank isn't in the mesh `within`.
    """
    own = {name: tensor for name, tensor in (names.targets | names.aliases).items() if name not in common}
    replicated = None if source.within is None else lambda *_: True
    shards = from_dtensors(own, within=source.within, strided=source.strided, replicated=replicated)
    outside = [name for name, each in own.items() if name not in shards and not is_dtensor(each)]
    if outside:
        what = "load_module: plain tensors of a rank that isn't in the mesh within="
        found, expected = f"rank {source.within.get_rank()}", f"one of {source.within.mesh.tolist()}"
        fix = "Pass the mesh of the ranks that hold this module, such as its pipeline stage's."
        raise MetadataError(error_text(what, offenders=outside, found=found, expected=expected, fix=fix))
    target = {
        # Each rank holds a plain tensor whole.
        name: ShardedTensor.from_rank_offsets(name, leaf, replica_id=world.rank)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for name, leaf in shards.items()
    }
    # Only to be compared: the first name fills the memory. Views of one memory are filled one after the other.
    apart = {*names.aliases, *overlapping(names.targets)}
    return target | {name: map_data(torch.empty_like, target[name]) for name in apart if name in target}


def loader_of(source: ModuleSource) -> Callable[..., Any]:
    """Return `load` with the source's arguments."""
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
    """Fill tensors without the other ranks."""
    if not fills:
        return
    names, alone = by_stored_key(fills), one_process()
    target = target_of(source, names, common, alone)
    # Other ranks' parts are not asked for.
    values = loader_of(source)(target, world=alone, validate_access_integrity=False)
    deliver(names, {**common, **values}, cast=source.cast)


def deliver(names: Named, values: Mapping[str, Any], *, cast: bool) -> None:
    """Put what isn't in a tensor's memory yet there, and raise where its other stored keys have other values."""
    for name, tensor in names.targets.items():
        local = local_tensor(tensor)
        # Several boxes were put together, elsewhere. A rank that a tensor's mesh doesn't have holds nothing of it.
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
        what, fix = "load_module: names of one tensor are stored with different values", "Untie them in the module."
        raise IntegrityError(error_text(what, offenders=differing, fix=fix))


def _check_fits(name: str, value: torch.Tensor, shape: torch.Size, dtype: torch.dtype, *, cast: bool) -> None:
    if value.shape != shape or (value.dtype != dtype and not cast):
        found, expected = f"{tuple(value.shape)} {value.dtype}", f"{tuple(shape)} {dtype}"
        fix = "Where only dtypes differ, pass cast=True."
        raise ShapeError(error_text(f"load_module: {name!r} doesn't fit", found=found, expected=expected, fix=fix))


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
    """Return a stored value as a module's own loading gets it; torch copies it into a tensor.

    In the dtype that is stored. A DTensor gets one with the same placements; what else a module of DTensors asks for
    is replicated on their mesh, since torch doesn't mix the two.

    Args:
        source: the checkpoint.
        common: values of the common state, by stored key.
        tensors: the tensors that `load_state_dict` fills, by name.
        dtypes: the dtypes of other tensors of the module's `state_dict`, by name.
        module: the module that asks.
        name: the name by which it asks.
        stored: what it asks for.

    Raises:
        ShapeError: The stored dtype differs, and the value isn't converted, or would be without its scales.
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
    """Raise where values that a hook asks for in another dtype are numbers by scales that are stored beside them."""
    stored = source.tree.metadata
    if not plain_matcher("load_module", source.plain, stored.keys)(key):
        dtypes = those_of({name: each.dtype for name, each in stored.items() if isinstance(each, ShardedTensor)})
        refuse_scaled("load_module", {key: dtype}, scaled_values({key: dtype}, dtypes))


def _replicated(module: torch.nn.Module, value: torch.Tensor) -> Any:
    """Return a tensor on the mesh of a module's DTensors; unchanged if it has none, or several meshes."""
    own = [each for each in module.parameters(recurse=False) if is_dtensor(each)]
    meshes: set[Any] = {each.device_mesh for each in own or filter(is_dtensor, module.parameters())}  # type: ignore[attr-defined]
    if len(meshes) != 1:
        return value
    from torch.distributed.tensor import DTensor, Replicate

    (mesh,) = meshes
    return DTensor.from_local(value.to(mesh.device_type), mesh, [Replicate()] * mesh.ndim, run_check=False)

"""`load_module`: a checkpoint's tensors go into a module's parameters and buffers by their names, however it is cut."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch

from ..._ambient import shielded
from ...checkpoint import load, load_common_state_dict, load_sharded_metadata
from ...errors import IntegrityError, KeyMismatch, MetadataError, ShapeError, UnsafeFile, UnsupportedValue, error_text
from ...mapping import ShardedTensor
from ...storage import Directory
from ...strategies import LoadOptions, Strategies
from ...trees import HOLE, map_data
from ...world import World, agree, current_world, on_rank_zero
from ._convert import from_dtensors, local_tensor
from ._module_names import Named, by_stored_key, overlapping
from ._placed import Strided, is_dtensor


@dataclass(frozen=True, slots=True)
class ModuleKeys:
    """What of a module and a checkpoint has no counterpart.

    Attributes:
        missing: what of the module holds tensors and isn't stored, by stored key, sorted, and parameters that a hook
            leaves out of `state_dict` and nothing fills; they keep their values.
        unused: keys of stored tensors that the module has no name for, sorted, and of what its own `load_state_dict`
            doesn't take.
        kept: other entries of its `state_dict` that aren't stored, such as extra states without tensors, by key,
            sorted.
    """

    missing: tuple[str, ...]
    unused: tuple[str, ...]
    kept: tuple[str, ...] = ()


@shielded
def load_module(
    module: torch.nn.Module,
    checkpoint_dir: Directory,
    *,
    key: Callable[[str], str] = str,
    strict: bool = True,
    cast: bool = False,
    plain: Sequence[str] = (),
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
    tensor of its own is looked for in the common state, where plain buffers and extra states may be. What of
    `state_dict` is neither a parameter nor a buffer (extra states, also as a `ShardedObject` of one cell, a quantised
    layer's scales, what a hook has changed) goes through the module's own `load_state_dict`, tensors in any size.
    Buffers that `state_dict` leaves out (``persistent=False``) keep their values. If it fails, what the module holds is
    lost.

    Args:
        module: with memory on any device: after ``module.to_empty(device=...)`` if it was made on the meta device, and
            with its weights tied again, which that takes apart.
        checkpoint_dir: a path or URL that all ranks see, or a `Storage`.
        key: returns the stored key for a name of the module's `state_dict`; by default they are the same. Tensors with
            one stored key are all filled with it, if they are of one size and cut alike.
        strict: whether a tensor that isn't stored, or isn't taken by the module's own `load_state_dict`, is an error.
            If False, the module keeps its values; its key is returned.
        cast: whether what is stored in another dtype is converted, as `load` does; else it is an error.
        plain: patterns of stored keys of values that need no scales, as for `load`.
        world: the ranks that take part; torch.distributed's default group, or else this process alone.
        within: the DeviceMesh whose ranks all hold this module, as for `from_dtensors`. Plain tensors are taken to be
            whole on each rank.
        strided: the meaning of a `_StridedShard`, as for `from_dtensors`.
        strategies: the dispatch table; None for the process's.
        options: how it is read.

    Returns:
        The keys that only one of the two has.

    Raises:
        KeyMismatch: a tensor has no name that is stored, or the module doesn't take it, and `strict` is True; or `key`
            returns one stored key for tensors that differ in size, dtype or placements.
        UnsupportedValue: the module is on the meta device.
        MetadataError: the module has plain tensors, and this rank isn't in the mesh `within`.
        IntegrityError: a tensor's several names are stored with different values.
        ShapeError: what is stored doesn't fit the module, or its own `load_state_dict` refuses it; or quantised values
            would be cast without their scales.
        CheckpointingException: what `load` raises.

    Examples:
        >>> import tempfile, shardtree as st
        >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(2, 1)
        >>> tree = {"weight": torch.ones(1, 2), "bias": torch.zeros(1), "more": torch.zeros(3)}
        >>> st.save({key: st.ShardedTensor.from_rank_offsets(key, data) for key, data in tree.items()}, folder)
        >>> load_module(model, folder)
        ModuleKeys(missing=(), unused=('more',), kept=())
        >>> model.weight.data
        tensor([[1., 1.]])
    """
    ranks = current_world(world)
    list_shards = partial(_stored_shards, checkpoint_dir, strategies, options)
    what = "load_module: list what is stored"
    is_tensor = on_rank_zero(ranks, what, lambda: {k: isinstance(v, ShardedTensor) for k, v in list_shards().items()})
    stored_keys = sorted(name for name in is_tensor if is_tensor[name])

    def find_names() -> tuple[Named, dict[str, Any], dict[str, Any]]:
        state = module.state_dict(keep_vars=True)
        plain = _plain_values(checkpoint_dir, {*map(key, state)} - {*is_tensor}, stored_keys, strategies, options)
        names = by_stored_key(module, state, key, is_tensor, plain)
        if strict:
            _refuse_missing(names.missing, stored_keys, names.absent.values())
        own = {name: tensor for name, tensor in (names.targets | names.aliases).items() if name not in plain}
        replicated = None if within is None else lambda *_: True
        shards = from_dtensors(own, within=within, strided=strided, replicated=replicated)
        _refuse_outside([name for name, each in own.items() if name not in shards and not is_dtensor(each)], within)
        through_hooks = {name for name in names.others.values() if name not in plain}
        whole = {name: shard for name, shard in list_shards().items() if name in through_hooks} if through_hooks else {}
        return names, plain, _target(names, shards, whole, ranks)

    names, in_common, target = agree(ranks, "load_module: find names", find_names, given={"strict": strict})
    values = load(
        target, checkpoint_dir, world=ranks, donate=True, cast=cast, plain=plain, strategies=strategies, options=options
    )
    agree(ranks, "load_module: compare tied tensors", partial(_fill, names, in_common | values, cast=cast))
    give = partial(_load_others, module, names, in_common | values, stored_keys, strict=strict, cast=cast)
    missing, extra = agree(ranks, "load_module: load the rest", give)
    rest = {*stored_keys} - names.targets.keys() - names.aliases.keys() - {*names.others.values()} | extra
    return ModuleKeys(tuple(sorted({*names.missing, *missing})), tuple(sorted(rest)), names.kept)


def _stored_shards(where: Directory, strategies: Strategies | None, options: LoadOptions | None) -> dict[str, Any]:
    """Return what is stored, by key: tensors, and objects that are the only one of their key."""
    shards = load_sharded_metadata(where, strategies=strategies, options=options).values()
    return {each.key: each for each in shards if isinstance(each, ShardedTensor) or prod(each.global_shape) == 1}


def _refuse_missing(missing: Sequence[str], stored_keys: Sequence[str], absent: Collection[str]) -> None:
    if missing:
        found = f"{len(stored_keys)} keys, such as {', '.join(stored_keys[:3])}"
        fix = "Tie weights that to_empty() took apart, map names to stored keys by key=, or pass strict=False."
        offenders = [f"{name} (which a hook leaves out of state_dict)" if name in absent else name for name in missing]
        error = KeyMismatch(
            error_text("load_module: not stored, or not in state_dict", offenders=offenders, found=found, fix=fix)
        )
        error.unexpected = tuple(missing)
        raise error


def _refuse_outside(names: Sequence[str], within: Any) -> None:
    if names:
        what = "load_module: plain tensors of a rank that isn't in the mesh within="
        found, expected = f"rank {within.get_rank()}", f"one of {within.mesh.tolist()}"
        fix = "Pass the mesh of the ranks that hold this module, such as its pipeline stage's."
        raise MetadataError(error_text(what, offenders=names, found=found, expected=expected, fix=fix))


def _target(names: Named, shards: Mapping[str, Any], whole: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Return what is loaded, by stored key: each rank's parts, and whole what goes through the module's hooks."""
    target = {
        # Each rank holds a plain tensor whole.
        name: ShardedTensor.from_rank_offsets(name, leaf, replica_id=world.rank)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for name, leaf in shards.items()
    }
    # Only to be compared: the first name fills the memory. Views of one memory are filled one after the other.
    apart = {*names.aliases, *overlapping(names.targets)}
    target |= {name: map_data(torch.empty_like, target[name]) for name in apart if name in target}
    for name, shard in whole.items():
        # In the size that is stored, but in the module's dtype, which `load` compares.
        dtype = {"dtype": names.dtypes[name]} if isinstance(shard, ShardedTensor) and name in names.dtypes else {}
        target[name] = replace(shard, replica_id=world.rank, **dtype)
    return target


def _plain_values(
    where: Directory,
    keys: Collection[str],
    stored_keys: Sequence[str],
    strategies: Strategies | None,
    options: LoadOptions | None,
) -> dict[str, Any]:
    """Return the values of the common state that have these keys; none where reading it takes pickled code."""
    if not keys:
        return {}
    with suppress(UnsafeFile, UnsupportedValue):
        tree = load_common_state_dict(where, strategies=strategies, options=options)
        values = {name: value for name, value in _by_key(tree) if name in keys}
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


def _fill(names: Named, values: Mapping[str, Any], *, cast: bool) -> None:
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


def _load_others(
    module: torch.nn.Module,
    names: Named,
    tensors: Mapping[str, Any],
    stored_keys: Sequence[str],
    *,
    strict: bool,
    cast: bool,
) -> tuple[set[str], set[str]]:
    """Give the module's own hooks what is neither a parameter nor a buffer of it.

    Returns:
        The keys of hidden parameters that this doesn't fill, and of what the module doesn't take.
    """
    values = {name: tensors[key] for name, key in names.others.items()}
    if not values:
        return set(), set()
    for name, key in names.others.items():
        value = values[name]
        if isinstance(value, torch.Tensor) and key in names.dtypes:
            _check_fits(key, value, value.shape, names.dtypes[key], cast=cast)
            values[name] = value.to(names.dtypes[key])
    try:
        result = module.load_state_dict(values, strict=False)
    except RuntimeError as error:
        what = "load_module: the module's own load_state_dict refuses what is stored"
        fix = "Load into a module of the same sizes, with the same hooks."
        raise ShapeError(error_text(what, offenders=sorted(values), found=str(error), fix=fix)) from error
    missing = {key for name, key in names.absent.items() if name in result.missing_keys}
    extra = {names.others[name] for name in result.unexpected_keys if name in values}
    if strict:
        if extra:
            what = "load_module: the module's own load_state_dict doesn't know what is stored: nothing of it was loaded"
            expected = "a load hook that undoes what the state_dict hook does"
            fix = "Register it (register_load_state_dict_pre_hook), or pass strict=False."
            raise KeyMismatch(error_text(what, offenders=sorted(extra), expected=expected, fix=fix))
        _refuse_missing(sorted(missing), stored_keys, missing)
    return missing, extra

"""JAX's arrays as shards, and back: one shard for each part of an array that a device of this process holds.

On CPUs, shards share JAX's memory. This module imports JAX; the package imports this module only at its first use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from ..core.mapping import ShardedTensor
from ..errors import KeyMismatch, TreeError, UnsupportedValue, error_text

try:
    import jax
    from jax.dtypes import prng_key
    from jax.tree_util import keystr, tree_flatten_with_path
except ImportError as missing:
    raise ImportError(f"{missing}: from_jax needs JAX: pip install 'shardtree[jax]'") from missing

__all__ = ["from_jax", "to_jax"]

Leaves = dict[str, Any]
"""Values by key; an array is a list of shards."""


def from_jax(tree: Any) -> Leaves:
    """Return the leaves of a JAX tree by key; each array becomes a list of shards, one for each device of this process.

    A key is the path's entries joined by dots, such as ``layers.0.weight``; `save` stores one tensor under it, whatever
    the sharding. Shards have the replica ids of JAX's shards, so that a part on several devices is written once.
    On CPUs, shards are JAX's own memory: never write to it, and don't donate the arrays to a jitted function before
    the save has returned. GPU memory is shared too if torch has CUDA; data on other devices is copied to the host.

    Abstract arrays (`jax.ShapeDtypeStruct` with a sharding) become shards without data, for the target of a load.

    Args:
        tree: A pytree as JAX flattens it, such as a module of Equinox, a state of Flax or of Optax. Typed random keys
            are stored as their data; leaves that aren't arrays stay as they are.

    Raises:
        TreeError: Two leaves have one key.
        UnsupportedValue: Torch can't import an array, such as one of 4-bit integers; or an abstract array has no
            sharding, or is a random key.

    Examples:
        >>> import jax.numpy as jnp
        >>> leaves = from_jax({"w": jnp.arange(4.0), "step": 3})
        >>> leaves["w"][0].data, leaves["w"][0].global_offset, leaves["step"]
        (tensor([0., 1., 2., 3.]), (0,), 3)
    """
    leaves = Leaves()
    for key, leaf in _by_key(tree):
        if key in leaves:
            fix = "Rename one: a key is a path's entries joined by dots."
            raise TreeError(error_text(f"from_jax: two leaves have the key {key!r}", fix=fix))
        if isinstance(leaf, jax.ShapeDtypeStruct):
            leaves[key] = _abstract_shards(key, leaf)
        else:
            leaves[key] = _shards(key, _data(leaf)) if isinstance(leaf, jax.Array) else leaf
    return leaves


def to_jax(leaves: Mapping[str, Any], like: Any) -> Any:
    """Return a JAX tree of the tensors that `load` returned for the result of `from_jax`.

    Args:
        leaves: Values by key; for each array a list with one tensor for each device, in the order of `from_jax`.
        like: The tree that was passed to `from_jax`, or one with the same shardings. Its values aren't used, so that
            its arrays may be abstract.

    Raises:
        KeyMismatch: A leaf is missing.
        UnsupportedValue: An abstract array has no sharding, or is a random key.

    Examples:
        >>> import jax.numpy as jnp, shardtree as st
        >>> state = {"w": jnp.arange(4.0)}
        >>> st.save(from_jax(state), "state")
        >>> to_jax(st.load(st.without_data(from_jax(state)), "state"), state)
        {'w': Array([0., 1., 2., 3.], dtype=float32)}
    """
    pairs = _by_key(like)
    if missing := [repr(key) for key, _ in pairs if key not in leaves]:
        heading, fix = "to_jax: leaves= lacks leaves of like=", "Pass as leaves= what load returned for from_jax(like)."
        raise KeyMismatch(error_text(heading, offenders=missing, fix=fix))
    arrays = jax.Array, jax.ShapeDtypeStruct
    values = [_array(key, leaves[key], leaf) if isinstance(leaf, arrays) else leaves[key] for key, leaf in pairs]
    return jax.tree.unflatten(jax.tree.structure(like), values)


def _by_key(tree: Any) -> list[tuple[str, Any]]:
    return [(keystr(path, simple=True, separator="."), leaf) for path, leaf in tree_flatten_with_path(tree)[0]]


def _data(array: jax.Array) -> jax.Array:
    return jax.random.key_data(array) if jax.numpy.issubdtype(array.dtype, prng_key) else array


def _shards(key: str, array: jax.Array) -> list[ShardedTensor]:
    shards = []
    for part in array.addressable_shards:
        offset = tuple(place.start or 0 for place in part.index)
        data = _tensor(key, part.data)
        shape = tuple(data.shape)
        shards.append(
            ShardedTensor(key, data, data.dtype, shape, tuple(array.shape), offset, None, replica_id=part.replica_id)
        )
    return shards


def _abstract_shards(key: str, array: jax.ShapeDtypeStruct) -> list[ShardedTensor]:
    parts, shards = _abstract_parts(key, array), []
    dtype = _tensor(key, jax.numpy.zeros((), array.dtype)).dtype
    for _, index, replica_id in parts:
        places = [place.indices(size) for place, size in zip(index, array.shape, strict=True)]
        offset, shape = tuple(start for start, *_ in places), tuple(stop - start for start, stop, _ in places)
        shards.append(ShardedTensor(key, None, dtype, shape, tuple(array.shape), offset, None, replica_id=replica_id))
    return shards


def _abstract_parts(key: str, array: jax.ShapeDtypeStruct) -> list[tuple[jax.Device, tuple[slice, ...], int]]:
    """Return (device, index, replica id) of each part of an abstract array on this process's devices.

    The parts are those that `addressable_shards` lists for a real array with the same sharding.

    Raises:
        UnsupportedValue: The array has no sharding, or is a random key, whose data have another shape.
    """
    if jax.numpy.issubdtype(array.dtype, prng_key):
        heading, fix = (
            f"from_jax: the leaf {key!r} is an abstract random key",
            "Pass the random key itself, or the abstract array of its data.",
        )
        raise UnsupportedValue(error_text(heading, found=array, fix=fix))
    if array.sharding is None:
        heading, fix = (
            f"from_jax: the abstract array {key!r} has no sharding",
            "Pass jax.ShapeDtypeStruct(..., sharding=...).",
        )
        raise UnsupportedValue(error_text(heading, found=array, fix=fix))
    copies, parts = Counter[str](), []
    for device, index in array.sharding.devices_indices_map(tuple(array.shape)).items():
        if device.process_index == jax.process_index():
            parts.append((device, index, copies[str(index)]))
        copies[str(index)] += 1
    return parts


def _tensor(key: str, part: jax.Array) -> torch.Tensor:
    (device,) = part.devices()
    platform = device.platform
    if platform != "cpu" and not (platform == "gpu" and torch.cuda.is_available()):
        part = jax.device_put(part, jax.local_devices(backend="cpu")[0])
    try:
        return torch.from_dlpack(part)
    except Exception as error:  # any class: JAX and torch refuse dtypes with different errors
        fix = "First convert it to a wider dtype that torch has: small floats to float32, 4-bit integers to int8."
        heading = f"from_jax: torch cannot import {key!r}"
        raise UnsupportedValue(error_text(heading, found=f"{part.dtype}: {error}", fix=fix)) from error


def _array(key: str, tensors: Any, like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    if isinstance(like, jax.ShapeDtypeStruct):
        return _on_devices(tensors, like, [device for device, *_ in _abstract_parts(key, like)])
    data = _data(like)
    array = _on_devices(tensors, data, [part.device for part in data.addressable_shards])
    return array if data is like else jax.random.wrap_key_data(array, impl=jax.random.key_impl(like))


def _on_devices(tensors: Any, like: Any, devices: list[jax.Device]) -> jax.Array:
    parts = [
        jax.device_put(jax.dlpack.from_dlpack(tensor.contiguous()), device)
        for tensor, device in zip(tensors, devices, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(tuple(like.shape), like.sharding, parts)

"""Save states of Equinox, Optax and Flax NNX, sharded over four devices of a CPU, load them again, and compare.

Run with XLA_FLAGS=--xla_force_host_platform_device_count=4 and a folder, in which each state becomes a checkpoint, and
its values a file of NumPy's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import shardtree as st
from shardtree.interop.jax import from_jax, to_jax

MESH = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("dp", "tp"))


class Words(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(4, 8, param_dtype=jnp.bfloat16, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)


def placed(array: jax.Array) -> jax.Array:
    """Return an array on all devices: matrices cut along `tp`, so that `dp` has copies, all else copied four times."""
    spec = PartitionSpec(None, "tp") if array.ndim == 2 and array.shape[1] % 2 == 0 else PartitionSpec()
    return jax.device_put(array, NamedSharding(MESH, spec))


def states() -> dict[str, Any]:
    model = eqx.nn.MLP(4, 8, 6, 1, key=jax.random.key(0))
    arrays = jax.tree.map(placed, eqx.filter(model, eqx.is_array))
    optimizer = optax.adamw(1e-3)
    moments = optimizer.update(arrays, optimizer.init(arrays), arrays)[1]
    _, state = nnx.split(Words(nnx.Rngs(0)))
    pure = jax.tree.map(placed, nnx.to_pure_dict(state))
    whole = jax.tree.map(placed, state)
    both = placed(jnp.arange(64.0).reshape(8, 8))
    both = jax.device_put(both, NamedSharding(MESH, PartitionSpec("dp", "tp")))
    return {"equinox": arrays, "optax": moments, "pure": pure, "nnx": whole, "plain": {"w": both, "step": 3}}


def bits(leaf: Any) -> np.ndarray:
    data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return np.asarray(data.astype(jnp.float32))


def puts_values_back(folder: Path) -> None:
    """Save modules, and put what is loaded into others."""
    first, second = (eqx.nn.MLP(4, 8, 6, 1, key=jax.random.key(seed)) for seed in (1, 2))
    st.save(from_jax(eqx.filter(first, eqx.is_array)), folder / "module")
    like = eqx.filter(second, eqx.is_array)
    again = eqx.combine(to_jax(st.load(st.without_data(from_jax(like)), folder / "module"), like), second)
    assert jnp.array_equal(again(jnp.ones(4)), first(jnp.ones(4)))
    words, others = (Words(nnx.Rngs(seed)) for seed in (1, 2))
    st.save(from_jax(nnx.state(words)), folder / "words")
    state = nnx.state(others)
    nnx.update(others, to_jax(st.load(st.without_data(from_jax(state)), folder / "words"), state))
    assert jnp.array_equal(others.up.kernel[...], words.up.kernel[...])
    assert jax.random.bits(others.drop.rngs.key[...]) == jax.random.bits(words.drop.rngs.key[...])
    pure = nnx.to_pure_dict(nnx.state(words))
    st.save(from_jax(pure), folder / "parameters")
    assert "up.kernel" in st.load_tensors_metadata(folder / "parameters")
    third = Words(nnx.Rngs(3))
    nnx.update(third, to_jax(st.load(st.without_data(from_jax(pure)), folder / "parameters"), pure))
    assert jnp.array_equal(third.up.kernel[...], words.up.kernel[...])


def abstract(leaf: Any) -> Any:
    """Return an array as its shape, dtype and sharding; random keys and other leaves stay."""
    if not isinstance(leaf, jax.Array) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def loads_into_abstract(folder: Path) -> None:
    """Load each state into one without arrays, whose shards are those of the arrays."""
    for name, state in states().items():
        like = jax.tree.map(abstract, state)
        targets, leaves = (st.without_data(from_jax(tree)) for tree in (like, state))
        assert not st.diff(targets, leaves), name
        again = to_jax(st.load(targets, folder / name), like)
        for mine, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
            if isinstance(theirs, jax.Array):
                assert mine.sharding == theirs.sharding, name
                assert np.array_equal(bits(mine), bits(theirs)), name


def main(folder: Path) -> None:
    assert jax.device_count() == 4
    for name, state in states().items():
        leaves = from_jax(state)
        for parts in leaves.values():
            for shard in parts if isinstance(parts, list) else ():
                assert shard.data.device.type == "cpu"
        st.save(leaves, folder / name)
        loaded = to_jax(st.load(st.without_data(leaves), folder / name), state)
        assert jax.tree.structure(loaded) == jax.tree.structure(state)
        for mine, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(state), strict=True):
            if isinstance(theirs, jax.Array):
                assert mine.sharding == theirs.sharding, name
                assert mine.dtype == theirs.dtype, name
                assert np.array_equal(bits(mine), bits(theirs)), name
            else:
                assert mine == theirs
        arrays = {
            jax.tree_util.keystr(path, simple=True, separator="."): bits(leaf)
            for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]
            if isinstance(leaf, jax.Array)
        }
        np.savez(folder / f"{name}.npz", **arrays)
    puts_values_back(folder)
    loads_into_abstract(folder)
    both = states()["plain"]["w"]
    parts = from_jax({"w": both})["w"]
    pointers = [part.data.unsafe_buffer_pointer() for part in both.addressable_shards]
    assert [shard.data.data_ptr() for shard in parts] == pointers  # no copy
    copied = from_jax({"w": placed(jnp.ones(3))})["w"]
    assert [shard.replica_id for shard in copied] == [0, 1, 2, 3]
    assert [shard.global_offset for shard in parts] == [(0, 0), (0, 4), (4, 0), (4, 4)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""States of JAX's libraries, sharded over several devices, are checkpoints that torch's ranks load in any layout."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardtree as st
from shardtree.errors import KeyMismatch, TreeError, UnsupportedValue

jax = pytest.importorskip("jax")
pytest.importorskip("equinox")
pytest.importorskip("flax")
pytest.importorskip("optax")
pytestmark = pytest.mark.peers

MESH, ROWS = st.Mesh(tp=2), st.P("tp")
KEYS = {
    "equinox": {"layers.0.weight", "layers.1.bias"},
    "optax": {"0.count", "0.mu.layers.0.weight", "0.nu.layers.1.bias"},
    "pure": {"up.kernel", "norm.mean", "drop.rngs.key"},
    "nnx": {"up.kernel.value", "drop.rngs.count.value"},
    "plain": {"w"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what a process with four devices has saved, and loaded again."""
    place = tmp_path_factory.mktemp("states")
    script = Path(__file__).parent / "scripts" / "jax_states.py"
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | flags | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, str(script), str(place)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return place


@pytest.mark.parametrize("name", KEYS)
def test_states_of_jax_load_on_torch_ranks(name: str, folder: Path) -> None:
    stored, expected = st.load_tensors_metadata(folder / name), dict(np.load(folder / f"{name}.npz"))
    assert stored.keys() == expected.keys()
    assert KEYS[name] <= stored.keys()

    def load(world: st.world.World) -> Any:
        target = st.abstract_at(dict(stored), MESH, specs, world.rank)
        return st.load(target, folder / name, world=world)

    specs = {
        key: ROWS if shard.global_shape and shard.global_shape[0] % 2 == 0 else st.P() for key, shard in stored.items()
    }
    first, second = st.simulate(2, load)
    for key, values in expected.items():
        own = torch.cat([first[key], second[key]]) if specs[key] == ROWS else first[key]
        assert np.array_equal(own.float().numpy(), values), key


def test_a_bfloat16_state_stays_one(folder: Path) -> None:
    assert st.load_tensors_metadata(folder / "pure")["up.kernel"].dtype == torch.bfloat16
    assert st.load_common_state_dict(folder / "plain") == {"step": 3}


@pytest.mark.parametrize(
    "cut",
    [
        lambda tree: st.shard(tree, MESH, ROWS),
        lambda tree: st.shard_at(tree, MESH, ROWS, 0),
        lambda tree: st.from_local(tree, MESH, ROWS, 0),
        lambda tree: st.abstract(tree, MESH, ROWS),
    ],
)
def test_an_array_among_tensors_is_refused_by_its_path(cut: Callable[[Any], Any]) -> None:
    tree = {"a": [jax.numpy.zeros(4)], "b": torch.zeros(4)}
    with pytest.raises(TreeError, match=r"(?s)tree\['a'\]\[0\].*from_jax"):
        cut(tree)


@pytest.mark.parametrize("make", [lambda: jax.numpy.zeros(4), lambda: jax.ShapeDtypeStruct((4,), jax.numpy.float32)])
def test_an_array_is_refused_by_saves_and_loads(make: Callable[[], Any], tmp_path: Path) -> None:
    leaf = make()  # an array starts JAX's threads, which no test that forks may meet
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(4)), "step": 1}, tmp_path / "saved")
    for call in (lambda: st.save({"w": leaf}, tmp_path / "new"), lambda: st.load({"w": leaf}, tmp_path / "saved")):
        with pytest.raises(TreeError, match=r"(?s)tree\['w'\].*from_jax"):
            call()


def test_an_abstract_array_needs_a_sharding() -> None:
    from shardtree.interop.jax import from_jax, to_jax

    bare = {"a": {"w": jax.ShapeDtypeStruct((4,), jax.numpy.float32)}}
    for call in (lambda: from_jax(bare), lambda: to_jax({"a.w": [torch.zeros(4)]}, bare)):
        with pytest.raises(UnsupportedValue, match=r"'a\.w' has no sharding"):
            call()
    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=jax.numpy.zeros(()).sharding)
    with pytest.raises(UnsupportedValue, match=r"'k' is an abstract random key"):
        from_jax({"k": key})


def test_what_torch_or_the_tree_lacks_is_refused_by_name() -> None:
    from shardtree.interop.jax import from_jax, to_jax

    with pytest.raises(UnsupportedValue, match=r"torch cannot import 'a\.w'"):
        from_jax({"a": {"w": jax.numpy.zeros(2, jax.numpy.int4)}})
    with pytest.raises(TreeError, match=r"two leaves have the key 'a\.b'"):
        from_jax({"a": {"b": 1}, "a.b": 2})
    with pytest.raises(KeyMismatch, match="'w'"):
        to_jax({}, {"w": jax.numpy.zeros(2)})

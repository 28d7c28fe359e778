"""Beside JAX: a mesh and a partition spec give each rank the index and replica that NamedSharding gives its device."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardtree.layouts import Mesh, PartitionSpec, mesh_shards
from tests.core.trees.samples import assert_caught

pytestmark = pytest.mark.peers

Ask = Callable[..., Any]
Held = list[list[Any]]
"""For each rank start and stop of each axis, and which replica it is."""


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Yield the function that asks JAX, in one process for all questions."""
    script = Path(__file__).parent / "scripts" / "jax_index_maps.py"
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        to, back = process.stdin, process.stdout

        def asked(shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec) -> Any:
            question = {"shape": shape, "mesh": mesh.shape, "spec": spec.entries}
            print(json.dumps(question), file=to, flush=True)
            return json.loads(back.readline())

        yield asked
        to.close()


@st.composite
def questions(draw: st.DrawFn) -> tuple[tuple[int, ...], Mesh, PartitionSpec]:
    """Return a strategy for shapes, meshes and specs that JAX knows: joint axes in any order, most shapes divisible."""
    names = draw(st.permutations(["dp", "tp", "pp"]))[: draw(st.integers(1, 3))]
    mesh = Mesh(**{name: draw(st.integers(1, 3)) for name in names})
    axes = draw(st.integers(0, 3))
    cut = {name: draw(st.integers(0, axes)) for name in draw(st.permutations(names))}
    entries = [tuple(name for name, at in cut.items() if at == axis) for axis in range(axes)]
    parts = [prod(mesh.shape[name] for name in entry) for entry in entries]
    shape = tuple(part * draw(st.integers(1, 3)) + draw(st.sampled_from([0, 0, 0, 1])) for part in parts)
    shortened = [entry[0] if len(entry) == 1 else entry or None for entry in entries]
    return shape, mesh, PartitionSpec(*shortened)


def held(shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec) -> Held | None:
    """Return what each rank holds; None where an axis is cut unevenly, which JAX refuses."""
    entries = [entry or () for entry in spec.entries]
    counts = [prod(mesh.shape[name] for name in ((entry,) if isinstance(entry, str) else entry)) for entry in entries]
    if any(size % count for size, count in zip(shape, counts, strict=False)):
        return None
    return [[[list(spans[0]) for spans in part.spans], part.replica_id] for part in mesh_shards(shape, mesh, spec)]


def check_as_jax(ask: Ask, find: Callable[..., Held | None], question: tuple[Any, ...]) -> None:
    assert find(*question) == ask(*question)


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(question=questions())
def test_each_rank_holds_what_jax_gives_its_device(ask: Ask, question: tuple[Any, ...]) -> None:
    check_as_jax(ask, held, question)


def with_axes_reversed(shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec) -> Held | None:
    return held(shape, Mesh(**dict(reversed(mesh.axes))), spec)


def with_joint_axes_reversed(shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec) -> Held | None:
    entries = (entry[::-1] if isinstance(entry, tuple) else entry for entry in spec.entries)
    return held(shape, mesh, PartitionSpec(*entries))


def without_replicas(shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec) -> Held | None:
    found = held(shape, mesh, spec)
    return None if found is None else [[box, 0] for box, _ in found]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [with_axes_reversed, with_joint_axes_reversed, without_replicas])
def test_the_law_catches(ask: Ask, fault: Callable[..., Any]) -> None:
    assert_caught(lambda find, question: check_as_jax(ask, find, question), fault, questions())

"""Meshes and specs as values: places and ranks, how they print, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given

from shardtree.layouts import AxisSplit, Mesh, PartitionSpec
from shardtree.testing import meshes
from tests.core.trees.samples import assert_caught


def check_places(rank_at: Callable[..., int], mesh: Mesh) -> None:
    places = [mesh.coordinates(rank) for rank in mesh.ranks]
    assert [rank_at(mesh, **place) for place in places] == list(mesh.ranks)
    assert places == sorted(places, key=lambda place: list(place.values())), "row-major"
    assert len({tuple(place.values()) for place in places}) == mesh.size


@given(meshes())
def test_places_and_ranks_are_inverse_and_row_major(mesh: Mesh) -> None:
    check_places(Mesh.rank_at, mesh)


def test_the_law_catches_the_first_axis_fastest() -> None:
    def first_fastest(mesh: Mesh, **place: int) -> int:
        return Mesh(**dict(reversed(mesh.axes))).on_ranks(mesh.ranks).rank_at(**place)

    assert_caught(check_places, first_fastest, meshes())


@given(meshes())
def test_a_mesh_prints_as_what_makes_it(mesh: Mesh) -> None:
    names: dict[str, Any] = {"Mesh": Mesh}
    assert eval(repr(mesh), names) == mesh


def test_specs_are_values() -> None:
    spec = PartitionSpec(("tp",), (), None, (AxisSplit("dp", 2), AxisSplit("pp")), at={"ep": 1})
    assert spec == PartitionSpec("tp", None, None, (AxisSplit("dp", 2), AxisSplit("pp")), at={"ep": 1})
    assert hash(spec) == hash(PartitionSpec(*spec.entries, at=dict(spec.at)))
    assert spec.axes == ("tp", "dp", "pp")
    assert repr(PartitionSpec("a", AxisSplit("b"))) == "PartitionSpec('a', (AxisSplit(axis='b', split_factor=1),))"

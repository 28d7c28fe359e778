"""Meshes and specs as values: places and ranks, how they print, what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given

from shardtree.errors import MetadataError
from shardtree.layouts import AxisSplit, Mesh, PartitionSpec
from shardtree.testing import meshes
from tests.trees.samples import assert_caught


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


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Mesh(tp=0), "expected at least 1"),
        (lambda: Mesh(tp=2.0), "expected an int"),
        (lambda: Mesh(tp=2).on_ranks([0]), "2 different ranks"),
        (lambda: Mesh(tp=2).on_ranks([0, 0]), "2 different ranks"),
        (lambda: Mesh(tp=2).on_ranks([-1, 0]), "2 different ranks"),
        (lambda: Mesh(tp=2).on_ranks(2), "found int, expected 2 ranks"),
        (lambda: Mesh(tp=2).coordinates(2), "one that is on the mesh"),
        (lambda: Mesh(tp=2).coordinates("1"), "found str, expected an int"),
        (lambda: Mesh(tp=2).rank_at(tp="1"), "found str, expected an int"),
        (lambda: Mesh(tp=2).rank_at(tp=1.0), "found float, expected an int"),
        (lambda: Mesh(tp=2).rank_at(tp=2), "an index of that axis"),
        (lambda: Mesh(tp=2).rank_at(dp=0), "an index of that axis"),
        (lambda: Mesh(tp=2, dp=2).rank_at(dp=0), "expected tp, dp"),
        (lambda: PartitionSpec("tp", "tp"), "'tp'"),
        (lambda: PartitionSpec("tp", at={"tp": 0}), "'tp'"),
        (lambda: PartitionSpec(3), "not an entry"),
        (lambda: PartitionSpec(["tp"]), "not an entry"),
        (lambda: PartitionSpec(("tp", AxisSplit("dp"))), "not an entry"),
        (lambda: PartitionSpec(("tp", None)), "not an entry"),
        (lambda: AxisSplit("tp", 0), "split_factor"),
        (lambda: AxisSplit(3), "axis"),
        (lambda: PartitionSpec(at={"pp": "0"}), "at"),
        (lambda: PartitionSpec(at={3: 0}), "at"),
        (lambda: PartitionSpec(at="pp"), "at"),
    ],
)
def test_what_is_no_mesh_or_spec_is_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(MetadataError, match=re.escape(words)):
        make()

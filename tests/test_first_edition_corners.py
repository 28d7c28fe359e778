"""tests/golden/first-edition-corners: containers at the root that one rank holds, and pieces without elements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardtree as st
from tests.golden import first_edition as first
from tests.test_first_edition import FOLDERS, as_loaded, assert_holds, backend_of, loaded, without_data
from tests.test_golden import same

CORNERS = sorted((Path(__file__).parent / "golden" / "first-edition-corners").iterdir())
in_every_format = pytest.mark.parametrize("folder", CORNERS, ids=lambda folder: folder.name)


def test_every_writable_format_has_its_checkpoints() -> None:
    assert {folder.name for folder in CORNERS} == {backend_of(folder) for folder in FOLDERS} == set(first.BACKENDS)


@in_every_format
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["own", "other rank's"])
def test_containers_at_the_root_load_on_the_rank_that_held_them_and_on_the_other(folder: Path, order: Any) -> None:
    trees = [first.corners(rank, folder.name) for rank in order]
    for result, tree in zip(loaded(folder, list(map(without_data, trees))), trees, strict=True):
        assert_holds(result, as_loaded(tree))


@in_every_format
@pytest.mark.parametrize("holder", first.HOLDERS)
def test_one_rank_loads_what_either_held_beside_empty_containers(folder: Path, holder: int) -> None:
    tree = first.rooted(holder, holder) | first.rooted(holder, 1 - holder)
    (result,) = loaded(folder, [without_data(tree)])
    assert_holds(result, as_loaded(tree) | {"list": [], "dict": {}, "tuple": (), "step": 7})


@in_every_format
@pytest.mark.parametrize("name", ["list.0", "list.1", "dict.0", "dict.1", "tuple.0", "tuple.1", "deep.0", "deep.1"])
def test_one_container_of_the_root_loads_alone(folder: Path, name: str) -> None:
    holder = int(name[-1])
    part = {name: first.rooted(holder, holder)[name]}
    (result,) = loaded(folder, [without_data(part)])
    assert_holds(result, as_loaded(part) | {"step": 7})


@in_every_format
def test_what_was_stored_beside_pieces_without_elements_loads_in_halves(folder: Path) -> None:
    trees = [{"new": [first.box("uneven", 0, 1), first.box("uneven", 1, 1)]}, {"new": [first.box("uneven", 1, 3)]}]
    for result, tree in zip(loaded(folder, list(map(without_data, trees))), trees, strict=True):
        assert_holds(result, as_loaded(tree))


@in_every_format
def test_every_tensor_of_the_corners_is_there(folder: Path) -> None:
    tensors = st.load_plain_tensors(folder)
    expected = {f"root.{kind}/{holder}" for kind in ("list", "dict", "tuple", "deep") for holder in first.HOLDERS}
    assert tensors.keys() == expected | {"uneven"} | ({"flat"} if folder.name != "huggingface" else set())
    for key, tensor in tensors.items():
        assert same(tensor, first.whole(key.partition("/")[0]))
        assert same(st.open_checkpoint(folder)[key].data.read(), tensor)
    assert st.verify(folder) == ()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_common_state_has_all_plain_values_and_holes_at_positions(folder: Path) -> None:
    common = st.load_common_state_dict(folder, options=st.LoadOptions(types=first.RECORDS))
    assert_holds(common, {**first.plain(), "groups": [{"lr": 0.1}]})
    if backend_of(folder) != "dcp":
        assert common["mixed"][0] is st.trees.HOLE and common["mixed"][1:] == [3, (st.trees.HOLE, "x")]
        assert common["moment"] == first.Moment(st.trees.HOLE, 5)


@in_every_format
def test_the_common_state_of_the_corners_keeps_what_was_empty(folder: Path) -> None:
    common = st.load_common_state_dict(folder)
    assert_holds(common, {"list": [], "dict": {}, "tuple": (), "step": 7})


def test_the_comparison_catches_one_element_of_the_first_edition_that_differs() -> None:
    part = {"list.0": first.rooted(0, 0)["list.0"]}
    (result,) = loaded(CORNERS[0], [without_data(part)])
    result["list.0"][0][1] += 1
    with pytest.raises(AssertionError):
        assert_holds(result, as_loaded(part))

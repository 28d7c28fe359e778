"""tests/golden/first-edition: what the first edition wrote, in every format, loads bit for bit for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardtree as st
from tests.golden import first_edition as first
from tests.options import load_keywords
from tests.test_golden import same

FOLDERS = sorted((Path(__file__).parent / "golden" / "first-edition").iterdir())
# Its dcp has no places for shards in lists, and Hugging Face's format neither objects nor flat ranges.
pytestmark = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def backend_of(folder: Path) -> str:
    return folder.name.partition("-")[0]


def without_data(tree: Any) -> Any:
    return st.map_shards(lambda leaf: leaf.without_data() if isinstance(leaf, st.ShardedBase) else leaf, tree)


def loaded(folder: Path, targets: list[Any], **options: Any) -> list[Any]:
    return st.simulate(
        len(targets),
        lambda world: st.load(
            targets[world.rank], folder, world=world, **load_keywords(types=first.RECORDS, **options)
        ),
    )


def as_loaded(tree: Any) -> Any:
    """Return what a load of a rank's own tree gives: data for shards, and what nonpersistent objects hold."""

    def value(leaf: Any) -> Any:
        if isinstance(leaf, st.ShardedBase):
            return leaf.data
        return leaf.unwrap() if isinstance(leaf, st.LocalNonpersistentObject) else leaf

    return st.map_shards(value, tree)


def assert_holds(result: Any, expected: Any) -> None:
    """Assert that a result has what is expected at its path, bit for bit; its dicts may have more."""
    if isinstance(expected, dict):
        assert type(result) is type(expected) and expected.keys() <= result.keys()
        for name, child in expected.items():
            assert_holds(result[name], child)
    elif isinstance(expected, (list, tuple)):
        assert type(result) is type(expected) and len(result) == len(expected)
        for mine, child in zip(result, expected, strict=True):
            assert_holds(mine, child)
    else:
        assert same(result, expected)


@pytest.mark.slow
@pytest.mark.parametrize("holder", first.HOLDERS)
def test_it_loads_in_its_own_layout_whichever_rank_holds_what(folder: Path, holder: int) -> None:
    trees = [first.tree(rank, holder, backend_of(folder)) for rank in range(first.RANKS)]
    for result, tree in zip(loaded(folder, list(map(without_data, trees))), trees, strict=True):
        assert_holds(result, as_loaded(tree))


def columns(rank: int, ranks: int) -> dict[str, Any]:
    def cut(key: str, axis: int) -> st.ShardedTensor:
        return st.ShardedTensor.from_rank_offsets(key, first.whole(key).chunk(ranks, axis)[rank], (axis, rank, ranks))

    rest = ("scalar", "empty", *(f"dtype.{name}" for name in first.DTYPES))
    replicas = {key: first.replicated(key, rank) for key in rest}
    return {"rows": cut("rows", 1), "uneven": cut("uneven", 0), "held": [cut("held.0", 1)], "rest": replicas}


@pytest.mark.parametrize("ranks", [1, 3])
def test_it_loads_in_another_layout(folder: Path, ranks: int) -> None:
    trees = [columns(rank, ranks) for rank in range(ranks)]
    targets = list(map(without_data, trees))
    for result, tree in zip(loaded(folder, [{"new": one} for one in targets]), trees, strict=True):
        assert_holds(result["new"], as_loaded(tree))


def test_its_flat_ranges_load_in_other_ranges_and_as_boxes(folder: Path) -> None:
    if "flat" not in first.tensors(0, backend_of(folder)):
        assert "flat" not in st.open_checkpoint(folder)
        return
    flat = st.ShardedTensor.from_rank_offsets_flat("flat", torch.zeros(11), (5, 4), flattened_range=slice(2, 13))
    boxes = [st.ShardedTensor.from_rank_offsets("flat", torch.zeros(5, 2), (1, 1, 2)), flat]
    (result,) = loaded(folder, [{"new": boxes}], validate_access_integrity=False)
    assert_holds(result["new"], [first.whole("flat")[:, 2:].contiguous(), first.whole("flat").flatten()[2:13]])


PARTS = ({}, {"tensors": {}}, {"held": {"list": []}}, {"empties": {"list": []}}, {"elsewhere": [()]})


@pytest.mark.parametrize("target", PARTS, ids=str)
def test_a_target_that_names_nothing_gets_all_plain_values(folder: Path, target: Any) -> None:
    (result,) = loaded(folder, [target])
    assert_holds(result, {**target, **first.plain(), "groups": [{"lr": 0.1}]})
    assert "mixed" not in result and "moment" not in result


def test_every_tensor_and_object_is_there(folder: Path) -> None:
    tensors = st.load_plain_tensors(folder)
    assert {"rows", "held.0", "held.1", "held.2", "held.3", "dtype.bfloat16"} <= tensors.keys()
    assert all(same(tensor, first.whole(key)) for key, tensor in tensors.items())
    opened = st.open_checkpoint(folder)
    assert all(same(opened[key].data.read(), tensor) for key, tensor in tensors.items())
    assert st.verify(folder) == ()


def test_the_common_state_has_all_plain_values_and_holes_at_positions(folder: Path) -> None:
    common = st.load_common_state_dict(folder, options=st.LoadOptions(types=first.RECORDS))
    assert_holds(common, {**first.plain(), "groups": [{"lr": 0.1}]})
    if backend_of(folder) != "dcp":
        assert common["mixed"][0] is st.trees.HOLE and common["mixed"][1:] == [3, (st.trees.HOLE, "x")]
        assert common["moment"] == first.Moment(st.trees.HOLE, 5)


def test_the_comparison_catches_one_element_that_differs(folder: Path) -> None:
    (result,) = loaded(folder, [{"new": first.replicated("scalar", 0).without_data()}])
    assert_holds(result["new"], first.whole("scalar"))
    with pytest.raises(AssertionError):
        assert_holds(result["new"] + 1, first.whole("scalar"))

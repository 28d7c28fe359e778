"""Saving as torch.distributed.checkpoint does: what its own functions make of it, and what it can't keep."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hs
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import shardtree as st
from shardtree.errors import TreeError, UnsupportedValue
from shardtree.formats.torch_dist._common import named_values
from shardtree.storage import MemoryStorage
from shardtree.testing import outline

DCP = ("dcp", 1)
COMMON = {
    "step": 7,
    "name": None,
    "optimizer": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.95)}, {"lr": 0.2}], "state": {0: {"count": 3}}},
    "lst": [1, [2, 3]],
    "empty": {},
    "none of them": [],
    "tensor": torch.arange(5),
    "tensors": [torch.arange(2), torch.arange(3)],
    "model": {"layers.0.scale": 2.0},
}

# Its functions warn that they run in one process.
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def tree() -> dict[str, Any]:
    make = st.ShardedTensor.from_rank_offsets
    shards = {"w": make("model.w", torch.arange(12.0).view(3, 4)), "step": make("model.step", torch.tensor(5))}
    model = {**COMMON["model"], **shards}
    rng = st.ShardedObject("rng", {"seed": 1}, (1,), (0,))
    return {**COMMON, "model": model, "rng": rng, "list of shards": [make("only", torch.ones(2))]}


@pytest.fixture
def folder(tmp_path: Any) -> str:
    st.save(tree(), tmp_path / "checkpoint", DCP)
    return str(tmp_path / "checkpoint")


# -- names


def plain(tree: Any) -> Any:
    """Values that compare, in place of tensors."""
    return ("tensor", tree.tolist()) if isinstance(tree, torch.Tensor) else tree


tensors = hs.builds(torch.tensor, hs.integers(0, 9))
values = hs.none() | hs.integers() | hs.text(max_size=3)


def trees(keys: Any, in_lists: Any = values, fewest: int = 1) -> Any:
    """Dicts, lists and tuples of values, with tensors in dicts."""
    nested = hs.recursive(
        in_lists,
        lambda inner: (
            hs.lists(inner, max_size=3)
            | hs.dictionaries(keys, inner | tensors, min_size=fewest, max_size=3)
            | hs.lists(in_lists, max_size=2).map(tuple)
        ),
        max_leaves=8,
    )
    return hs.dictionaries(keys, nested | tensors, max_size=4)


def check_names(tree: dict[str, Any], names: Any = named_values) -> None:
    """Raise unless names and paths are those that torch.distributed.checkpoint gives, or both refuse."""
    try:
        flat, paths = flatten_state_dict(tree)
    except ValueError as error:
        assert "duplicated" in str(error)
        with pytest.raises(TreeError, match="two values named"):
            names(tree)
        return
    expected = {name: (paths[name], plain(value)) for name, value in flat.items()}
    assert {name: (path, plain(value)) for name, (path, value) in names(tree).items()} == expected


@given(tree=trees(hs.text("ab.", min_size=1, max_size=3)))
def test_names_and_paths_are_those_of_torch(tree: dict[str, Any]) -> None:
    check_names(tree)


def test_the_law_catches_lists_that_are_always_taken_apart() -> None:
    def all_apart(tree: dict[str, Any]) -> Any:
        found = {}
        for name, (path, value) in named_values(tree).items():
            items = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
            found |= {f"{name}.{at}" if at is not None else name: (path, item) for at, item in items}
        return found

    with pytest.raises(AssertionError):
        check_names({"a": [1, 2]}, all_apart)


def test_what_torch_would_lose_is_stored_whole() -> None:
    found = named_values({"empty": {}, "by number": {0: {"lr": 1}, "a": 2}})
    assert found == {"empty": (("empty",), {}), "by number": (("by number",), {0: {"lr": 1}, "a": 2})}


# -- what torch.distributed.checkpoint makes of it


def test_its_conversion_to_one_file_gives_the_common_state_back_and_tensors_by_key(folder: str, tmp_path: Any) -> None:
    dcp_to_torch_save(folder, tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt", weights_only=False)
    assert torch.equal(found.pop("model.w"), torch.arange(12.0).view(3, 4))
    assert found.pop("model.step") == 5
    assert torch.equal(found.pop("only"), torch.ones(2))
    assert found.pop("rng/shard_0_1") == [{"seed": 1}]
    assert outline(found) == outline(COMMON)


@given(tree=trees(hs.text("abc", min_size=1, max_size=3), values | tensors, fewest=0))
def test_its_conversion_gives_every_common_state_back(tree: dict[str, Any]) -> None:
    with TemporaryDirectory() as folder:
        st.save(tree, f"{folder}/checkpoint", DCP, options=st.SaveOptions(durable=False))
        dcp_to_torch_save(f"{folder}/checkpoint", f"{folder}/one.pt")
        assert outline(torch.load(f"{folder}/one.pt", weights_only=False)) == outline(tree)
        assert outline(st.load_common_state_dict(f"{folder}/checkpoint")) == outline(tree)


def test_the_folder_has_its_files_and_no_other(folder: str) -> None:
    assert set(st.storage.LocalStorage(folder).names()) == {".metadata", "__0_0.distcp", "__0_1.distcp"}


def test_shards_alone_need_no_file_of_values() -> None:
    storage = MemoryStorage()
    st.save([st.ShardedTensor.from_rank_offsets("w", torch.ones(2))], storage, DCP)
    assert storage.names() == (".metadata", "__0_0.distcp")
    assert torch.equal(st.load([st.ShardedTensor.from_rank_offsets("w", torch.zeros(2))], storage)[0], torch.ones(2))


# -- what it can't keep

OBJECT = st.ShardedObject("object", 1, (1,), (0,))


def with_shards(tree: Any) -> Any:
    """Put a shard where the word stands."""
    if isinstance(tree, dict):
        return {key: with_shards(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(with_shards, tree))
    return st.ShardedTensor.from_rank_offsets("other", torch.ones(2)) if tree == "shard" else tree


@pytest.mark.parametrize(
    ("tree", "error", "said"),
    [
        pytest.param({"a.b": 1, "a": {"b": 2}}, TreeError, r"two values named 'a\.b'", id="two paths of one name"),
        pytest.param({"model.w": 1}, TreeError, r"has the name of 'model\.w'", id="a value named like a tensor"),
        pytest.param({"o/shard_0_1": 1}, TreeError, "named like an object", id="a value named like an object"),
        pytest.param({"model.w": {"lr": 1}}, TreeError, "has the name of", id="a dict named like a tensor"),
        pytest.param([1, "shard"], TreeError, "only in a dict with strings as keys", id="no dict"),
        pytest.param({3: 1}, TreeError, "only in a dict with strings as keys", id="no texts"),
        pytest.param({"a": object()}, UnsupportedValue, "object", id="a value that no archive holds"),
    ],
)
def test_a_common_state_that_it_cannot_keep_is_refused(tree: Any, error: type[Exception], said: str) -> None:
    shards = {"the": st.ShardedTensor.from_rank_offsets("model.w", torch.ones(2)), "o": OBJECT}
    whole = with_shards(tree)
    storage = MemoryStorage()
    with pytest.raises(error, match=said):
        st.save({**whole, **shards} if isinstance(whole, dict) else whole, storage, DCP)
    assert storage.names() == ()


@pytest.mark.parametrize("mixed", [[1, "shard"], ["shard", {"a": 1}], (1, "shard"), [[1, ("shard", {"a": 1})], 2]])
def test_a_shard_among_plain_values_keeps_its_place(mixed: Any) -> None:
    storage, tree = MemoryStorage(), with_shards({"l": mixed, "o": OBJECT})
    st.save(tree, storage, DCP)
    loaded = st.load(tree, storage)
    assert str(loaded) == str(st.map_shards(lambda leaf: getattr(leaf, "data", leaf), tree))

"""The law of filled targets: a plain tensor comes back as what is stored, or is named by an error or as unfilled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hy

import shardtree as st
from shardtree.core.trees import path_key
from shardtree.errors import KeyMismatch, TreeError, render_path
from shardtree.shell.checkpoint.loading import _check, _omissions
from shardtree.storage import MemoryStorage
from shardtree.trees import leaves_with_paths
from tests.core.trees.samples import assert_caught
from tests.shell.checkpoint.parts import FORMATS

RANKS = 2
PLACES = [("model", "a"), ("model", "b"), ("model", "layers", "c"), ("optim", "state", "d"), ("e",), ("list", "f")]
KINDS = hy.sampled_from(["by its path", "by another key", "plain", "absent"])
"""How the tensor of a place was saved: as a shard with the path's key, as one with another key, as a plain value."""

Load = Callable[[list[Any], Any], tuple[list[Any], list[tuple[str, ...]]]]


def nested(values: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        node = tree
        for entry in path[:-1]:
            node = node.setdefault(entry, {})
        node[path[-1]] = value
    return tree


def stored(kinds: Mapping[tuple[str, ...], str], backend: tuple[str, int]) -> MemoryStorage:
    def leaf(number: int, path: tuple[str, ...], kind: str) -> Any:
        if kind == "plain":
            return torch.tensor([float(number)] * 2)
        key = path_key(path) if kind == "by its path" else f"other.{number}x"
        return st.ShardedTensor.from_rank_offsets(key, torch.tensor([float(number)] * 2))

    values = {path: leaf(number, path, kind) for number, (path, kind) in enumerate(kinds.items()) if kind != "absent"}
    folder = MemoryStorage()
    st.save(nested(values) | {"step": 1}, folder, backend)
    return folder


def load_all(targets: list[Any], folder: Any) -> tuple[list[Any], list[tuple[str, ...]]]:
    reports: dict[int, tuple[str, ...]] = {}

    def one(world: Any) -> Any:
        options = st.LoadOptions(report=lambda report: reports.update({world.rank: report.unfilled}))
        return st.load(targets[world.rank], folder, world=world, options=options)

    loaded = st.simulate(RANKS, one)
    return loaded, [reports[rank] for rank in range(RANKS)]


def filled_or_named(load: Load, kinds: list[str], asked: list[list[bool]], backend: tuple[str, int]) -> None:
    saved = dict(zip(PLACES, kinds, strict=True))
    folder = stored(saved, backend)
    wanted = [[path for path, asks in zip(PLACES, each, strict=True) if asks] for each in asked]
    targets = [nested({path: torch.zeros(2) for path in paths}) for paths in wanted]
    explained = st.explain_ranks(targets, folder)
    try:
        loaded, unfilled = load(targets, folder)
    except KeyMismatch as error:
        assert explained.ok is False
        # What wasn't saved counts too: in a container of shards alone it can't be told from one with another key.
        lacking = {path for paths in wanted for path in paths if saved[path] in ("by another key", "absent")}
        assert any(render_path(path) in str(error) for path in lacking)
        return
    assert explained.ok and set(explained.unfilled) == {path for paths in unfilled for path in paths}
    for tree, paths, named in zip(loaded, wanted, unfilled, strict=True):
        found = dict(leaves_with_paths(tree))
        for path in paths:
            number = PLACES.index(path)
            assert render_path(path) in named or torch.equal(found[path], torch.tensor([float(number)] * 2)), path
            assert (render_path(path) in named) == (path not in found)
            assert saved[path] in ("by its path", "plain") or render_path(path) in named


MANY = hy.lists(KINDS, min_size=len(PLACES), max_size=len(PLACES))
ASKED = hy.lists(hy.lists(hy.booleans(), min_size=len(PLACES), max_size=len(PLACES)), min_size=RANKS, max_size=RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("backend", FORMATS, ids=lambda backend: backend[0])
@given(kinds=MANY, asked=ASKED)
def test_a_plain_tensor_is_filled_or_named(backend: tuple[str, int], kinds: list[str], asked: list[list[bool]]) -> None:
    filled_or_named(load_all, kinds, asked, backend)


def test_the_law_catches_tensors_that_go_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    def ignoring(targets: list[Any], folder: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_check, "asking_whole", lambda target, kinds: target)
            patch.setattr(_omissions, "unfilled_paths", lambda target, tree: [])
            return load_all(targets, folder)

    assert_caught(filled_or_named, ignoring, MANY, ASKED, hy.just(FORMATS[0]))


def in_memory(source: Any, target: Any) -> Any:
    return st.reshard([source], [target])[0]


@pytest.mark.parametrize("move", [in_memory, st.redistribute], ids=["reshard", "redistribute"])
def test_in_memory_a_plain_tensor_is_a_plain_value_of_the_sources_or_refused(move: Callable[[Any, Any], Any]) -> None:
    shard, plain = st.ShardedTensor.from_rank_offsets("model.w", torch.ones(2)), torch.ones(2)
    moved = move({"model": {"w": shard}, "buffer": plain}, {"model": {"w": shard}, "buffer": torch.zeros(2)})
    assert torch.equal(moved["buffer"], plain) and torch.equal(moved["model"]["w"].data, shard.data)
    with pytest.raises(
        TreeError,
        match=r"the target has plain tensors at paths where the source has no plain value\n  tree\['model'\]\['w'\]",
    ):
        move({"model": {"w": shard}, "step": 1}, {"model": {"w": torch.zeros(2)}})

"""Metadata that takes long to read is parsed by one rank of a load; the others get copies, and load the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import shardtree as st
from shardtree.formats.huggingface import _load
from shardtree.formats.torch_dist import _listing
from shardtree.world import World, simulate

RANKS = 3
WHOLE = {"a": torch.arange(12.0).reshape(6, 2), "b": torch.arange(3)}
FORMATS = {"torch_dist": (_listing, "read_metadata_file"), "dcp": (_listing, "read_metadata_file")}
FORMATS |= {"huggingface": (_load, "read_listing")}


def saved(folder: Path, backend: str) -> Path:
    tensors = {key: st.ShardedTensor.from_rank_offsets(key, data) for key, data in WHOLE.items()}
    st.save(tensors, folder, (backend, 1))
    return folder


def counted(monkeypatch: pytest.MonkeyPatch, backend: str) -> list[int]:
    """Return a list that gets the rank of each call that reads the format's metadata."""
    module, name = FORMATS[backend]
    read, ranks = getattr(module, name), []
    monkeypatch.setattr(module, name, lambda checkpoint: ranks.append(checkpoint.world.rank) or read(checkpoint))
    return ranks


def rows(world: World, folder: Path) -> torch.Tensor:
    target = st.ShardedTensor.from_rank_offsets("a", torch.zeros(2, 2), (0, world.rank, world.size))
    return st.load({"a": target}, folder, world=world)["a"]


def check_one_parses(load: Callable[[World, Path], object], folder: Path, ranks: list[int]) -> list[object]:
    found = simulate(RANKS, lambda world: load(world, folder))
    assert ranks == [0]
    return found


@pytest.mark.parametrize("backend", FORMATS)
def test_one_rank_of_a_load_parses(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, ranks = saved(tmp_path, backend), counted(monkeypatch, backend)
    assert torch.equal(torch.cat(check_one_parses(rows, folder, ranks)), WHOLE["a"])


@pytest.mark.parametrize("backend", FORMATS)
def test_one_rank_of_a_conversion_parses(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, ranks = saved(tmp_path / "from", backend), counted(monkeypatch, backend)

    def convert(world: World, place: Path) -> object:
        return st.convert(place, tmp_path / "to", backend="safetensors", world=world)

    check_one_parses(convert, folder, ranks)
    back = simulate(RANKS, lambda world: st.convert(tmp_path / "to", tmp_path / "back", backend=backend, world=world))
    assert (len(set(map(str, back))), ranks) == (1, [0, 0])  # what was written is looked at by one rank, too
    assert all(torch.equal(data, WHOLE[key]) for key, data in st.load_plain_tensors(tmp_path / "back").items())


def test_ranks_that_see_another_source_are_an_error(tmp_path: Path) -> None:
    folders = [saved(tmp_path / str(rank), "safetensors") for rank in range(RANKS)]

    def convert(world: World) -> bool:
        with pytest.raises(st.errors.WorldError, match="rank 1 sees another checkpoint than rank 0"):
            st.convert(folders[world.rank], tmp_path / "to", backend="dcp", world=world)
        return True

    assert simulate(RANKS, convert) == [True] * RANKS
    assert not (tmp_path / "to").exists()


def test_the_count_catches_a_format_without_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, ranks = saved(tmp_path, "torch_dist"), counted(monkeypatch, "torch_dist")
    parse = (st.StrategyAction.PARSE, "torch_dist", 1)
    table = {row: st.default_strategies[row] for row in st.default_strategies if row != parse}
    with pytest.raises(AssertionError):
        check_one_parses(
            lambda world, place: st.load_plain_tensors(place, world=world, strategies=table), folder, ranks
        )


def test_nothing_is_parsed_for_a_function_of_the_caller_s(tmp_path: Path) -> None:
    folder = saved(tmp_path, "torch_dist")
    table = dict(st.default_strategies) | {(st.StrategyAction.PARSE, "torch_dist", 1): refuse}

    def load(world: World) -> torch.Tensor:
        target = st.ShardedTensor.from_rank_offsets("a", torch.zeros(2, 2), (0, world.rank, world.size))
        return st.load({"a": target}, folder, fill_with_ones, world=world, strategies=table)["a"]

    assert all(torch.equal(found, torch.ones(2, 2)) for found in simulate(RANKS, load))


def refuse(_: st.strategies.Checkpoint) -> dict[str, object]:
    raise AssertionError


def fill_with_ones(_: st.strategies.Checkpoint, shards: Sequence[st.ShardedTensor]) -> st.storage.ReadReport:
    for shard in shards:
        shard.data.fill_(1)
    return st.storage.ReadReport()

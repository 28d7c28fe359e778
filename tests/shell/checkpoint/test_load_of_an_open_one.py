"""A load of a checkpoint that is open: it isn't opened again, and a checkpoint that took its place is noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import CheckpointReplaced
from shardtree.world import World

QUICK = st.SaveOptions(durable=False)


def saved(folder: Path, value: float) -> None:
    tree = {"w": st.ShardedTensor.from_rank_offsets("w", torch.full((4, 2), value)), "step": value}
    st.save(tree, folder, overwrite=True, options=QUICK)


def target(rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    return {"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(4 // ranks, 2), (0, rank, ranks))}


@pytest.mark.parametrize("options", [None, st.LoadOptions(verify="all")], ids=["the same options", "other options"])
def test_an_open_checkpoint_loads_as_its_folder_does(options: st.LoadOptions | None, tmp_path: Path) -> None:
    saved(tmp_path, 3.0)
    opened = st.open_checkpoint(tmp_path)
    loaded = st.load(target(), opened.checkpoint, options=options)
    assert loaded["step"] == 3.0 and torch.equal(loaded["w"], torch.full((4, 2), 3.0))


def test_ranks_load_it_together(tmp_path: Path) -> None:
    saved(tmp_path, 3.0)

    def load(world: World) -> Any:
        return st.load(target(world.rank, 2), st.open_checkpoint(tmp_path).checkpoint, world=world)["w"]

    assert torch.equal(torch.cat(st.simulate(2, load)), torch.full((4, 2), 3.0))


def test_what_was_parsed_is_kept_and_only_with_the_same_options(tmp_path: Path) -> None:
    saved(tmp_path, 3.0)
    counted: list[int] = []
    row = next(row for row in st.default_strategies if row[:2] == (st.StrategyAction.LOAD_METADATA, "safetensors"))
    parse = st.get_default_strategy(*row)

    def parsed(checkpoint: Any) -> int:
        counted.append(0)
        return 0

    def counting(checkpoint: Any) -> Any:
        checkpoint.once(parsed)
        return parse(checkpoint)

    table = st.default_strategies | {row: counting}
    opened = st.open_checkpoint(tmp_path, strategies=table)
    st.load(target(), opened.checkpoint, strategies=table)
    assert len(counted) == 1
    st.load(target(), opened.checkpoint, strategies=table, options=st.LoadOptions(verify="all"))
    st.load(target(), tmp_path, strategies=table)
    assert len(counted) == 3


def test_one_that_took_its_place_is_noticed(tmp_path: Path) -> None:
    saved(tmp_path, 3.0)
    opened = st.open_checkpoint(tmp_path)
    saved(tmp_path, 4.0)
    with pytest.raises(CheckpointReplaced):
        st.load(target(), opened.checkpoint)

"""Simulated worlds with Megatron-Core's axes, and what all of their ranks save and load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

import shardtree as st
from tests.options import load_keywords, save_keywords

RANKS = 8
FORMATS = {"safetensors": ("safetensors", 1), "torch_dist": ("torch_dist", 1), "zarr": ("zarr", 3)}
in_every_format = pytest.mark.parametrize("backend", FORMATS.values(), ids=FORMATS)
whole = st.ShardedTensor.from_rank_offsets


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's coordinates, and the sizes of the axes."""

    tp: int
    dp: int
    pp: int
    tp_size: int
    dp_size: int
    pp_size: int


def places(tp_size: int, pp_size: int, ranks: int = RANKS) -> list[Place]:
    """Return where each rank is in the order tp-dp-pp, where tensor-parallel ranks are neighbours."""
    dp_size = ranks // (tp_size * pp_size)
    return [
        Place(rank % tp_size, rank // tp_size % dp_size, rank // (tp_size * dp_size), tp_size, dp_size, pp_size)
        for rank in range(ranks)
    ]


def saved(trees: Sequence[Any], backend: tuple[str, int] | None = None, **options: Any) -> st.storage.MemoryStorage:
    """Return a checkpoint of which each rank saved its tree."""
    folder = st.storage.MemoryStorage()
    st.simulate(
        len(trees), lambda world: st.save(trees[world.rank], folder, backend, world=world, **save_keywords(**options))
    )
    return folder


def loaded(targets: Sequence[Any], folder: Any, **options: Any) -> list[Any]:
    """Return what each rank's target gives."""
    return st.simulate(
        len(targets),
        lambda world: st.load(targets[world.rank], folder, world=world, **load_keywords(**options)),
        timeout=900,
    )


def data_of(tree: Any) -> Any:
    """Return what a load of a tree that was saved gives: shards' data."""
    return st.map_shards(lambda leaf: leaf.data if isinstance(leaf, st.ShardedBase) else leaf, tree)


def assert_same(found: Any, expected: Any) -> None:
    """Raise unless two trees have the same structure and values."""
    difference = st.diff(found, expected)
    assert not difference, str(difference)

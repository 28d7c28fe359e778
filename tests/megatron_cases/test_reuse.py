"""Saving one structure again: what test_cached_metadata and test_global_metadata_reuse say; and of small views."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardtree as st
from tests.megatron_cases.worlds import (
    RANKS,
    Place,
    assert_same,
    data_of,
    in_every_format,
    loaded,
    on_ranks,
    places,
    saved,
    whole,
)


def tree(rank: int, value: float = 0.0) -> dict[str, Any]:
    return {
        "sd_a": whole("keyA", torch.arange(8.0).reshape(2, 4) + value, replica_id=rank),
        "sd_b": whole("keyB", torch.arange(105.0).reshape(3, 5, 7) + value, replica_id=RANKS - rank - 1),
    }


@pytest.mark.slow
@in_every_format
@pytest.mark.parametrize("knows", [False, True], ids=["exchanged layout", "known layout"])
def test_saves_of_one_structure_have_equal_metadata_and_each_its_own_values(backend: Any, knows: bool) -> None:
    options = {"layout": st.layouts.tree_columns(on_ranks(tree))} if knows else {}
    first = st.load_sharded_metadata(saved(on_ranks(tree), backend))
    for value in (1.0, 2.0, 3.0):
        trees = on_ranks(lambda rank, value=value: tree(rank, value))
        folder = saved(trees, backend, **options)
        assert_same(st.load_sharded_metadata(folder), first)
        for result, own in zip(loaded(on_ranks(tree), folder), trees, strict=True):
            assert_same(result, data_of(own))


def layers(place: Place) -> dict[str, Any]:
    weight = torch.arange(64.0).reshape(8, 8)
    return {"w": whole("w", weight.chunk(place.tp_size)[place.tp], (0, place.tp, place.tp_size), replica_id=place.dp)}


@in_every_format
def test_what_was_loaded_in_another_layout_is_saved_in_that_one(backend: Any) -> None:
    folder = saved([layers(place) for place in places(2, 1)], backend)
    targets = [st.without_data(layers(place)) for place in places(4, 1)]
    again = [st.rebox(target, data) for target, data in zip(targets, loaded(targets, folder), strict=True)]
    second = saved(again, backend)
    assert_same(st.load_plain_tensors(second), st.load_plain_tensors(folder))


@pytest.mark.parametrize("backend", [("safetensors", 1), ("torch_dist", 1)], ids=str)
def test_a_small_view_of_a_large_tensor_takes_little_space(backend: Any, tmp_path: Path) -> None:
    view = torch.ones(1_000_000)[:10]
    st.save({"a": whole("keyA", view), "b": whole("keyB", view)}, tmp_path, backend)
    sizes = {path.name: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
    assert sizes and max(sizes.values()) < 10_000, sizes


@in_every_format
def test_a_flipped_bit_is_found_and_a_sound_checkpoint_is_sound(backend: Any) -> None:
    folder = saved([{"w": whole("w", torch.arange(4096.0))}], backend)
    assert st.verify(folder) == ()
    name = max(folder.all_names(), key=lambda name: len(folder.read(name)))
    changed = bytearray(folder.read(name))
    changed[len(changed) // 2] ^= 1
    folder.write(name, [memoryview(changed)], durable=False)
    with pytest.raises(st.errors.CorruptCheckpoint):
        loaded([{"w": whole("w", torch.zeros(4096))}], folder)
    assert len(st.verify(folder)) == 1

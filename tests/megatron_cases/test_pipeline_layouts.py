"""Layers over pipeline stages: what test_pipeline_parallel_layout says of uneven, empty and interleaved stages."""

from __future__ import annotations

from itertools import count
from typing import Any
from zlib import crc32

import pytest
import torch

import shardtree as st
from tests.megatron_cases.worlds import Place, assert_same, data_of, in_every_format, loaded, places, saved
from tests.megatron_cases.worlds import whole as make

UNEVEN = ["e", "d", "dd", "d", "", "d", "d", "ddo"]  # a letter a module: embedding, decoder layer, output layer
HALVES = ["edddd", "ddddo"]
ONE = ["eddddddddo"]
# Each is (tensor-parallel size, pipeline size, chunks); several chunks a stage are interleaved.
LAYOUTS = {
    "4 stages of 2 chunks": (1, 4, UNEVEN),
    "2 stages": (1, 2, HALVES),
    "2 tensor ranks": (2, 1, ONE),
    "4 tensor ranks": (4, 1, ONE),
    "an empty stage": (1, 4, ["edd", "ddd", "", "dddo"]),
}
PAIRS = [
    ("4 stages of 2 chunks", "2 stages"),
    ("4 stages of 2 chunks", "2 tensor ranks"),
    ("4 tensor ranks", "2 stages"),
    ("2 stages", "4 stages of 2 chunks"),
    ("an empty stage", "2 tensor ranks"),
]


def weight(key: str) -> torch.Tensor:
    return torch.arange(32.0).reshape(8, 4) + crc32(key.encode()) % 1000


def module(key: str, place: Place, *, experts: bool) -> dict[str, Any]:
    """Return a module's weight, cut along its rows; and, of two experts, one that every tensor rank holds."""
    rows = weight(key).chunk(place.tp_size)[place.tp]
    found = {"weight": make(key, rows, (0, place.tp, place.tp_size), replica_id=place.dp)}
    if experts:
        mine = (place.tp, place.dp)
        found["experts"] = [
            make(f"{key}.expert", weight(f"{key}.{n}"), (0, n, 2), prepend_axis_num=1, replica_id=mine)
            for n in range(2)
        ]
    return found


def rank_tree(place: Place, chunks: list[str], *, experts: bool) -> dict[str, Any]:
    """Return a stage's chunks; layers are numbered from zero in each, and their keys have the model's numbers."""
    numbers, tree = count(), {}
    for index, chunk in enumerate(chunks):
        layers = [f"decoder.layers.{next(numbers)}" for letter in chunk if letter == "d"]
        ends = [name for letter, name in (("e", "embedding"), ("o", "output_layer")) if letter in chunk]
        if index % place.pp_size == place.pp:
            tree[f"model{index // place.pp_size}"] = {
                "layers": {str(own): module(key, place, experts=experts) for own, key in enumerate(layers)},
                **{key: module(key, place, experts=False) for key in ends},
            }
    return tree


def trees(name: str, *, experts: bool) -> list[dict[str, Any]]:
    tp_size, pp_size, chunks = LAYOUTS[name]
    return [rank_tree(place, chunks, experts=experts) for place in places(tp_size, pp_size)]


@pytest.mark.slow
@in_every_format
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_layers_load_on_other_stages_and_chunks(backend: Any, source: str, target: str, experts: bool) -> None:
    folder = saved(trees(source, experts=experts), backend)
    expected = trees(target, experts=experts)
    results = loaded([st.without_data(tree) for tree in expected], folder)
    for result, tree in zip(results, expected, strict=True):
        assert_same({name: result[name] for name in tree}, data_of(tree))
        # Beside the target's chunks there may be a stored one, which was empty on rank 0.
        assert all(child == {"layers": {}} for name, child in result.items() if name not in tree)

"""What the errors of trees say, to the letter: what, found, expected and what to do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardtree.core.trees import check_is_tree, check_stars, join, key_form, match_keys, refuse_hidden
from shardtree.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from shardtree.trees import (
    HOLE,
    apply_factories,
    apply_factory_merges,
    combine,
    extract_metadata,
    flatten_with_paths,
    map_data,
    map_shards,
    merge,
)
from tests.core.trees.messages import read_messages, said
from tests.core.trees.samples import halves, join_halves

W = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2))
FACTORY = ShardedTensorFactory("f", torch.arange(4.0), halves, join_halves)
RNG = ShardedObject("rng", 1, (2,), (0,))


def again(key: str, data: Any, *_: Any) -> Any:
    return ShardedTensorFactory(key, data, again, torch.cat)


@dataclass
class Options:
    cache: Any


class Cut(torch.Tensor):
    placements = ()


CALLS: dict[str, Callable[[], Any]] = {
    "not a tree": lambda: check_is_tree("save", 3),
    "hidden": lambda: refuse_hidden("save", [(("a",), {W}), (("b", 1), Options([W])), (("c",), 1)]),
    "other forms": lambda: refuse_hidden("save", [(("a",), Cut()), (("b",), torch.ones(1)), (("c",), torch.nn.ReLU())]),
    "a dataclass of tensors": lambda: refuse_hidden("save", [(("a",), Options([W.data])), (("b",), Options([1]))]),
    "a chain": lambda: apply_factories([again("f", torch.zeros(1))]),
    "merge: structure": lambda: apply_factory_merges({"a": {0: 1}}, {"a": [FACTORY]}),
    "merge: length": lambda: apply_factory_merges({"a": [1]}, {"a": [1, FACTORY]}),
    "merge: lacks": lambda: apply_factory_merges({"a": [1]}, {"a": {1: FACTORY, 2: FACTORY, 0: 1}}),
    "join: unfilled": lambda: join({"a": [HOLE, 1, HOLE, HOLE]}, {"a": [HOLE, HOLE, "w", HOLE]}),
    "join: unfilled tuple": lambda: join({}, {"a": ("w", HOLE)}),
    "join: nothing": lambda: join(HOLE, HOLE),
    "join: conflict": lambda: join({"a": [{"b": 1}]}, {"a": [["w"]]}),
    "merge: lengths": lambda: merge({"a": [1]}, {"a": [HOLE, 2]}),
    "merge: a leaf and a tree": lambda: merge({"a": 1}, {"a": {"b": 1}}),
    "merge: a tree and a leaf": lambda: merge({"a": {"b": 1}}, {"a": 1}),
    "merge: list and dict": lambda: merge({"a": [1]}, {"a": {0: 1}}),
    "combine: kinds": lambda: combine({"a": [HOLE]}, {"a": deque([HOLE])}),
    "pattern: not a text": lambda: key_form(3),  # type: ignore[arg-type]
    "stars": lambda: check_stars("split", "a.*", ["b.*", "c", "**.*.d"]),
    "unused patterns": lambda: match_keys("rename", ["a.*", "a.b", "c"], ["a.b"]),
    "maps: structure": lambda: map_shards(lambda x, y: x, {"a": 1, "b": 2}, {"b": 1}),
    "maps: a third": lambda: map_shards(lambda x, y, z: x, [1], [2], [3, 4]),
    "data: shape": lambda: map_data(lambda data: data[:1], {"w": FACTORY}),
    "metadata": lambda: extract_metadata(
        [W, replace(W, dtype=torch.int8, data=None), replace(RNG, global_shape=(3,)), RNG]
    ),
    "metadata: a tensor and an object": lambda: extract_metadata([replace(W, key=RNG.unique_key), RNG]),
    "rebuild": lambda: flatten_with_paths([1, 2])[1]([1]),
}


SAID = read_messages(Path(__file__).with_name("messages.txt"))


@pytest.mark.parametrize("name", CALLS)
def test_errors_say_what_is_wrong_and_what_to_do(name: str) -> None:
    assert said(CALLS[name]) == SAID[name]


def test_every_message_has_its_call() -> None:
    assert list(CALLS) == list(SAID)

"""flat and nested undo each other, and what couldn't be undone is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from shardtree.errors import TreeError
from shardtree.mapping import ShardedTensor
from shardtree.trees import flat, nested
from tests.core.trees.samples import Pair, assert_caught

W = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
VALUES = some.sampled_from([1, None, "text", [1, 2], (), W, Pair(1, 2)])


def dicts(names: str) -> some.SearchStrategy[Any]:
    """Return nested dicts, empty ones too."""
    keys = some.text(names, max_size=2)
    return some.dictionaries(keys, some.recursive(VALUES, lambda inner: some.dictionaries(keys, inner, max_size=3)))


def nested_undoes_flat(there: Callable[[Any], Any], tree: Any) -> None:
    before = repr(tree)
    found = nested(there(tree))
    assert repr(found) == before == repr(tree)


@given(dicts("ab0"))
def test_nested_undoes_flat(tree: Any) -> None:
    nested_undoes_flat(flat, tree)


@pytest.mark.parametrize("fault", [lambda tree: {name: value for name, value in flat(tree).items() if value != {}}])
def test_nested_undoes_flat_catches_empty_dicts_that_get_lost(fault: Callable[[Any], Any]) -> None:
    assert_caught(nested_undoes_flat, fault, dicts("ab0"))


@given(dicts("ab0."))
def test_flat_undoes_nested(tree: Any) -> None:
    try:
        names = flat(tree)
        there = nested(names)
    except TreeError as error:
        assert any(words in str(error) for words in ("one name", "one path", "prefix"))
        return
    assert flat(there) == names


def test_another_separator() -> None:
    tree = {"params": {"layers.0": {"kernel": 1}}}
    assert flat(tree, separator="/") == {"params/layers.0/kernel": 1}
    assert nested(flat(tree, separator="/"), separator="/") == tree

"""A shard inside a value that trees don't enter is refused by its path, and never becomes part of a pickle."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import shardtree
from shardtree.errors import UnsupportedValue
from shardtree.storage import MemoryStorage
from shardtree.trees import refuse_hidden
from tests.trees.samples import assert_caught

SHARD = shardtree.ShardedTensor.from_rank_offsets("hidden", torch.arange(4.0))


class Holder:
    """An object of the user's, with itself inside."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.itself = self


class Slotted:
    """One whose attributes are in slots."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class SlottedToo(Slotted):
    """One whose slots are its parent's, and a name alone."""

    __slots__ = "other"


@dataclass
class Config:
    """A dataclass."""

    value: Any


WRAPS: list[Callable[[Any], Any]] = [
    Holder, Slotted, SlottedToo, Config, lambda value: argparse.Namespace(value=value), lambda value: [value, 1],
    lambda value: {"value": value}, lambda value: (value,), lambda value: deque([value]),
]  # fmt: skip
OPAQUE = st.sampled_from(WRAPS[:5])
INNER = st.recursive(
    st.sampled_from([SHARD, shardtree.LocalNonpersistentObject(1), 1, "text", torch.ones(2)]),
    lambda inner: st.builds(lambda wrap, value: wrap(value), st.sampled_from(WRAPS), inner),
)
VALUES = st.builds(lambda wrap, value: wrap(value), OPAQUE, INNER)


def holds_shards(value: Any) -> bool:
    if isinstance(value, (shardtree.ShardedBase, shardtree.LocalNonpersistentObject)):
        return True
    if isinstance(value, (list, tuple, deque)):
        return any(map(holds_shards, value))
    inner = value["value"] if isinstance(value, dict) else getattr(value, "value", None)
    return inner is not None and holds_shards(inner)


def holds_tensors(value: Any) -> bool:
    inner = getattr(value, "value", value)
    items = inner.values() if isinstance(inner, dict) else inner if isinstance(inner, (list, tuple, deque)) else ()
    return (
        isinstance(inner, torch.Tensor)
        or (inner is not value and holds_tensors(inner))
        or any(map(holds_tensors, items))
    )


def hides_tensors(value: Any) -> bool:
    """Return whether a dataclass that isn't pickled with what is around it holds a tensor."""
    if isinstance(value, Config):
        return holds_tensors(value)
    inside = vars(value) if isinstance(value, argparse.Namespace) else value
    items = inside.values() if isinstance(inside, dict) else inside if isinstance(inside, (list, tuple, deque)) else ()
    return any(map(hides_tensors, items))


def refused(save: Callable[[Any], None], value: Any) -> None:
    try:
        save(value)
    except UnsupportedValue as error:
        assert (holds_shards(value) or hides_tensors(value)) and "tree['args'][0]" in str(error)
    else:
        assert not holds_shards(value) and not hides_tensors(value)


def save_pickled(value: Any) -> None:
    shardtree.save(
        {"w": shardtree.ShardedTensor.from_rank_offsets("w", torch.ones(1)), "args": [value]},
        MemoryStorage(),
        options=shardtree.SaveOptions(allow_pickle=True),
    )


@given(VALUES)
def test_hidden_shards_and_tensors_of_dataclasses_are_refused_and_nothing_else_is(value: Any) -> None:
    refused(save_pickled, value)


def test_the_law_of_hidden_shards_catches_a_save_that_looks_at_dataclasses_alone() -> None:
    def shallow(value: Any) -> None:
        if isinstance(value, (Config, argparse.Namespace)):
            refuse_hidden("save", [(("args", 0), value)])

    assert_caught(refused, shallow, VALUES)

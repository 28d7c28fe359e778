"""The common state as Megatron-Core's common.pt: what it writes we read, what we write it reads."""

from __future__ import annotations

from collections import OrderedDict, deque, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.core.trees import common_with_holes, without_holes
from shardtree.errors import CheckpointingException
from shardtree.formats.archives import add_record, encode_archive
from shardtree.formats.pickles import write_pickle
from shardtree.formats.torch import COMMON_FILE, load_common, save_common
from shardtree.storage import MemoryStorage
from shardtree.strategies import Checkpoint, LoadOptions, PendingSave, SaveOptions
from shardtree.testing import outline
from shardtree.trees import HOLE
from shardtree.world import one_process

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


Pair = namedtuple("Pair", "left right")


def written(common: Any, **options: Any) -> MemoryStorage:
    storage = MemoryStorage()
    pending = PendingSave(storage, "save-1", one_process(), options=SaveOptions(durable=False, **options))
    assert save_common(pending, common) == {"common_backend": "torch", "common_backend_version": 1}
    return storage


def read(storage: Any, **options: Any) -> Any:
    return load_common(Checkpoint(storage, {}, one_process(), LoadOptions(**options)))


def shard(key: str = "w") -> st.ShardedTensor:
    return st.ShardedTensor.from_rank_offsets(key, torch.arange(4))


def trees() -> some.SearchStrategy[Any]:
    leaves = some.just(shard()) | some.integers(0, 3) | some.just("a")
    inner = some.recursive(
        leaves,
        lambda child: some.one_of(
            some.lists(child, max_size=3),
            some.lists(child, max_size=3).map(tuple),
            some.lists(child, max_size=2).map(deque),
            some.dictionaries(some.sampled_from("abc") | some.integers(0, 2), child, max_size=3),
            some.dictionaries(some.sampled_from("abc"), child, max_size=3).map(OrderedDict),
            some.tuples(child, child).map(lambda pair: Pair(*pair)),
        ),
        max_leaves=8,
    )
    return some.dictionaries(some.sampled_from("xyz"), inner, max_size=3)


def check_holes(storage: MemoryStorage, tree: Any) -> None:
    """The law: holes are back where they were, but for those of dicts, which say nothing."""
    found, expected = read(storage, types=(Pair,)), without_holes(common_with_holes(tree))
    assert outline(found) == outline(expected)


@given(trees())
def test_holes_keep_their_places(tree: Any) -> None:
    check_holes(written(common_with_holes(tree)), tree)


def test_the_law_of_holes_catches_positions_that_shift() -> None:
    tree = {"x": [shard(), 1, 2]}
    check_holes(written(common_with_holes(tree)), tree)
    with pytest.raises(AssertionError):
        check_holes(written({"x": [1, 2]}), tree)  # as Megatron-Core stores it


def test_an_empty_dict_in_a_list_stays_one() -> None:
    assert read(written({"x": [{}, HOLE]})) == {"x": [{}, HOLE]}


@pytest.mark.parametrize(
    "record",
    [
        write_pickle([("x", 0)]),
        write_pickle([("x", 7)]),
        write_pickle([("y",)]),
        write_pickle([("x", 1, "deep")]),
        write_pickle([()]),
        write_pickle(["x"]),
        write_pickle({"x": 1}),
        write_pickle([("x", [])]),
        write_pickle([("x",) * 300]),
        b"cos\nsystem\n(S'true'\ntR.",
        b"",
    ],
)
def test_a_record_of_holes_that_contradicts_the_tree_is_refused(record: bytes) -> None:
    storage = MemoryStorage()
    data = add_record(encode_archive({"x": [1, {}]}), ".shardtree_holes", record)
    storage.replace(COMMON_FILE, data, durable=False)
    with pytest.raises(CheckpointingException, match=r"common\.pt"):
        read(storage)

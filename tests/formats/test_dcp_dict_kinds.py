"""Kinds of containers in a common state: every format keeps them, and DCP's other readers see what DCP would."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as some
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import shardtree as st
from shardtree.errors import CheckpointingException, CorruptCheckpoint
from shardtree.formats.archives import encode_archive
from shardtree.formats.torch_dist import _common, _dict_kinds
from shardtree.shell.table import formats_with
from shardtree.storage import MemoryStorage
from shardtree.strategies import StrategyAction
from tests.core.trees.samples import assert_caught

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

DCP = ("dcp", 1)


class Pair(NamedTuple):
    """A named tuple."""

    left: int
    right: Any


KINDS: dict[str, Any] = {
    "defaultdict": defaultdict(list, {"b": [1], "a": [2]}),
    "defaultdict of nothing": defaultdict(None, a=1),
    "defaultdict of defaultdicts": defaultdict(dict, {"x": defaultdict(int, y=1), "z": {}}),
    "defaultdict by number": defaultdict(list, {1: [2]}),
    "empty defaultdict": defaultdict(set),
    "OrderedDict": OrderedDict([("b", 1), ("a", {"q": 2})]),
    "OrderedDicts": OrderedDict(b=OrderedDict(z=1, y=2), a=OrderedDict()),
    "in a list": [OrderedDict(b=1, a=2), defaultdict(float, c=0.5), {"d": 3}],
    "Counter": Counter("abca"),
    "named tuple": Pair(1, {"a": (2,)}),
    "tuples": ({"a": 1}, (), (OrderedDict(b=1),)),
    "other keys": {1: 2, "a": 3, (1, 2): None, None: 4},
    "sets": [{1, 2}, frozenset({3}), set()],
    "deque": deque([1, {"a": 2}], 5),
    "empty": [{}, [], (), OrderedDict()],
    "size": torch.Size([1, 2]),
    "deep": {"m": {"n": defaultdict(list, {"k": OrderedDict(b=1, a=[1, {"z": defaultdict(int, q=1)}])})}},
}


def kinds_in(tree: Any) -> Any:
    """Return a tree's containers and values as what compares by kind, factory and order too."""
    if isinstance(tree, dict):
        factory = tree.default_factory if isinstance(tree, defaultdict) else None
        return type(tree), factory, [(key, kinds_in(value)) for key, value in tree.items()]
    if isinstance(tree, (list, tuple, deque)):
        return type(tree), getattr(tree, "maxlen", None), [kinds_in(value) for value in tree]
    return type(tree), tree


def shard() -> st.ShardedTensor:
    return st.ShardedTensor.from_rank_offsets("w", torch.ones(2))


def reloaded(tree: Any, backend: Any = DCP) -> Any:
    folder = MemoryStorage()
    st.save(tree, folder, backend)
    return st.load_common_state_dict(folder, options=st.LoadOptions(types=(Pair,)))


BACKENDS = [each for each in sorted(formats_with(StrategyAction.SAVE_SHARDED)) if each[0] != "huggingface"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_container_comes_back_in_every_format(name: str, backend: Any) -> None:
    found = reloaded({"w": shard(), "v": KINDS[name]}, backend)
    assert kinds_in(found["v"]) == kinds_in(KINDS[name])


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_dicts_around_shards_and_the_outermost_keep_their_kind_through_conversions(backend: Any) -> None:
    tree = OrderedDict(step=1, model=defaultdict(dict, {"w": shard(), "lr": 0.5}), last=2)
    there, back = MemoryStorage(), MemoryStorage()
    st.save(tree, there, backend)
    st.convert(there, back, backend=DCP)
    found = st.load_common_state_dict(back)
    assert type(found) is OrderedDict and type(found["model"]) is defaultdict and found["model"].default_factory is dict
    assert st.verify(back) == st.verify(back) and not st.compare(there, back).values


def trees() -> some.SearchStrategy[Any]:
    keys = some.text("ab.", min_size=1, max_size=2)
    leaves = some.one_of(some.integers(0, 9), some.none(), some.just(()))

    def deeper(inner: some.SearchStrategy[Any]) -> some.SearchStrategy[Any]:
        pairs = some.lists(some.tuples(keys, inner), max_size=3, unique_by=lambda pair: pair[0])
        factories = some.sampled_from([None, list, dict, int])
        dicts = [pairs.map(dict), pairs.map(OrderedDict), some.builds(defaultdict, factories, pairs)]
        return some.one_of(*dicts, some.lists(inner, max_size=2))

    return some.dictionaries(some.text("ab", min_size=1, max_size=2), some.recursive(leaves, deeper, max_leaves=6))


def check_kinds(tree: dict[str, Any], load: Any = reloaded) -> None:
    try:
        _common.named_values(tree)
    except CheckpointingException:  # two values of one name
        return
    assert kinds_in(load({"w w": shard(), **tree})) == kinds_in(tree)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(trees())
def test_kinds_of_dicts_come_back_whatever_they_lie_in(tree: dict[str, Any]) -> None:
    check_kinds(tree)


def test_the_law_of_kinds_catches_plain_dicts() -> None:
    def plain(tree: Any) -> Any:
        found = reloaded(tree)
        return {key: dict(value) if isinstance(value, defaultdict) else value for key, value in found.items()}

    assert_caught(lambda load, tree: check_kinds(tree, load), plain, trees())


# What DCP's own functions see


TREE = {"stats": defaultdict(list, {"b": [1], "a": 2}), "groups": [OrderedDict(lr=0.1, wd=0.2)]}


def test_torchs_own_readers_see_what_they_would_have_written(tmp_path: Path) -> None:
    st.save({"w": shard(), **TREE}, tmp_path / "ours", DCP)
    dcp.save({"w": torch.ones(2), **TREE}, checkpoint_id=tmp_path / "theirs")
    found = []
    for name in ("ours", "theirs"):
        dcp_to_torch_save(tmp_path / name, tmp_path / f"{name}.pt")
        found.append(torch.load(tmp_path / f"{name}.pt", weights_only=False))
    assert {key: kinds_in(found[0][key]) for key in TREE} == {key: kinds_in(found[1][key]) for key in TREE}
    target = {"w": torch.zeros(2), "stats": defaultdict(list, {"b": [], "a": 0}), "groups": [OrderedDict(lr=0, wd=0)]}
    dcp.load(target, checkpoint_id=tmp_path / "ours")
    assert target["stats"] == TREE["stats"] and target["groups"] == TREE["groups"]
    assert type(st.load_common_state_dict(tmp_path / "theirs")["stats"]) is dict, "torch does not say which it was"


# Records that nothing wrote


@pytest.mark.parametrize(
    "kinds",
    [
        [(1, OrderedDict(a=1))],
        [(-1, OrderedDict())],
        [(True, OrderedDict())],
        [(2, OrderedDict())],
        [(1, {})],
        [(1, Counter())],
        [[1, OrderedDict()]],
        [(1, OrderedDict(), 2)],
        {1: OrderedDict()},
    ],
)
def test_a_record_that_contradicts_its_value_is_corrupt(kinds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dict_kinds, "encode_archive", lambda value, **options: encode_archive(kinds))
    folder = MemoryStorage()
    st.save({"w": shard(), "v": OrderedDict(a=1)}, folder, DCP)
    with pytest.raises(CorruptCheckpoint, match=r"list of dict types|record of a dict"):
        st.load_common_state_dict(folder)


def test_a_record_of_a_dict_where_a_list_is_is_corrupt() -> None:
    with pytest.raises(ValueError, match="a list is recorded as a dict"):
        _common.nested({("v", 0): 1}, {("v",): OrderedDict()})

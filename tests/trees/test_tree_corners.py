"""Trees at their edges: what is empty, nested, of a kind of its own, or in the last place."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from shardtree.errors import TreeError, UnsupportedValue
from shardtree.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
from shardtree.trees import (
    HOLE,
    Difference,
    Record,
    apply_factories,
    apply_factory_merges,
    as_integers,
    build_factories,
    cast,
    combine,
    comparable,
    diff,
    empty_data,
    is_hollow,
    join,
    join_data,
    leaves_with_paths,
    map_shards,
    namedtuple_types,
    partition,
    prune,
    refuse_hidden,
    rename,
    select,
    without_data,
)
from tests.trees.samples import Config, Pair, halves, join_halves, twice

W = ShardedTensor.from_rank_offsets("w", torch.arange(4.0))
RNG = ShardedObject("rng", 1, (1,), (0,))


@dataclass
class Options:
    cache: Any = None
    late: Any = field(init=False)


@pytest.mark.parametrize(
    ("tree", "pruned"),
    [
        ([HOLE, HOLE], [HOLE, HOLE]),
        ((HOLE, {"a": HOLE}), (HOLE, HOLE)),
        ({"a": HOLE, "b": [HOLE]}, {}),
        ([], []),
        (HOLE, HOLE),
        ({"a": {}, "b": [[]]}, {"a": {}, "b": [[]]}),
        ({"a": [HOLE, {"b": HOLE, "c": 1}]}, {"a": [HOLE, {"c": 1}]}),
        (Pair(HOLE, HOLE), Pair(HOLE, HOLE)),
    ],
)
def test_pruning_takes_out_holes_and_what_holds_nothing_else(tree: Any, pruned: Any) -> None:
    found = prune(tree)
    assert found == pruned and type(found) is type(tree)


def test_what_has_no_holes_is_shared_by_pruning() -> None:
    tree = {"a": [1, {}], "b": {"c": HOLE, "d": 2}}
    assert prune(tree)["a"] is tree["a"]
    assert prune(tree["a"]) is tree["a"]


def test_a_difference_of_any_kind_is_true() -> None:
    path = ("a",)
    assert not Difference()
    assert all(map(bool, [Difference((path,)), Difference((), (path,)), Difference((), (), (path,))]))


@pytest.mark.parametrize(
    "value",
    [
        {W},
        frozenset({RNG.key, LocalNonpersistentObject}) | {W},
        Namespace(a=1, b={"c": [W]}),
        Namespace(a=(1, Options([{"b": RNG}]))),
        Options({"a": W}),
        Options({1, W}),
        Options(LocalNonpersistentObject(1)),
        ShardedObject("o", {"a": [Options(W)]}, (1,), (0,)),
        ShardedObject("o", Namespace(w=W), (1,), (0,)),
    ],
)
def test_shards_in_what_trees_do_not_enter_are_refused(value: Any) -> None:
    with pytest.raises(UnsupportedValue, match=r"tree\['a'\]\[2\]: " + type(value).__name__):
        refuse_hidden("save", [(("a", 1), 3), (("a", 2), value)])


@pytest.mark.parametrize(
    "value", [W, Options, Options([1, {"a": (2,)}]), {1, 2}, Namespace(a=[{}]), RNG, W.data, "text", None]
)
def test_what_holds_no_shards_is_let_pass(value: Any) -> None:
    refuse_hidden("save", [(("a",), value)])


def test_values_nested_without_end_are_let_pass() -> None:
    nested: list[Any] = []
    nested.append(nested)
    refuse_hidden("save", [(("a",), Options(nested))])
    deep: Any = W
    for _ in range(99):
        deep = [deep]
    with pytest.raises(UnsupportedValue):
        refuse_hidden("save", [(("a",), Options(deep))])


@pytest.mark.parametrize(
    ("common", "target", "joined"),
    [
        ({}, ["w"], ["w"]),
        ({}, ("w", HOLE), None),
        ({"w": HOLE}, ["a"], ["a"]),
        ([HOLE, HOLE], {"w": "a"}, {"w": "a"}),
        ([HOLE, HOLE], {"w": HOLE}, {}),
        ({"w": HOLE}, {"v": "a"}, {"v": "a"}),
        ({"step": 1}, {"v": "a"}, {"step": 1, "v": "a"}),
        ({}, {}, {}),
        ({}, [], []),
    ],
)
def test_a_tree_of_nothing_but_shards_takes_the_targets_shape(common: Any, target: Any, joined: Any) -> None:
    if joined is None:
        with pytest.raises(TreeError):
            join(common, target)
    else:
        assert join(common, target) == joined


def test_traces_of_shards_alone_are_told_from_other_trees() -> None:
    assert all(map(is_hollow, ({"w": HOLE}, (HOLE,), [HOLE, [HOLE]], {}, HOLE, Record("kind", {"w": HOLE}))))
    assert not any(map(is_hollow, (3, {"w": HOLE, "s": 1}, [[HOLE, None]])))
    assert comparable({"a": {"w": HOLE}, "b": [HOLE, 1], "c": [], "d": 0}) == {"b": [HOLE, 1], "d": 0}
    assert comparable(3) == 3


def test_unfilled_places_are_named_where_they_are() -> None:
    with pytest.raises(TreeError, match=r"\n  tree\['a'\]\['b'\]\[1\]\[0\]\n"):
        join({"a": {"b": [1, (HOLE, 2, HOLE)]}}, {"a": {"b": [HOLE, (HOLE, HOLE, "w")]}})
    with pytest.raises(TreeError, match=r"\n  tree\['a'\]\['b'\]\[0\]\n"):
        join({}, {"a": {"b": [HOLE, "w"]}})


def test_containers_keep_what_makes_them_their_own() -> None:
    tree = defaultdict(list, {"w": W, "o": OrderedDict(z=W, a=1)})
    renamed = rename(tree, str.upper)
    assert renamed.default_factory is list and type(renamed["o"]) is OrderedDict
    assert list(renamed["o"]) == ["z", "a"]
    assert without_data({"p": Pair(W, 1)})["p"] == Pair(W.without_data(), 1)


def test_none_is_a_leaf_in_every_container() -> None:
    tree = Config(a=None, b=Config(c=[None]), d=Pair(None, 1))
    assert leaves_with_paths(tree) == [(("a",), None), (("b", "c", 0), None), (("d", 0), None), (("d", 1), 1)]
    assert map_shards(lambda leaf: leaf is None, tree) == {"a": True, "b": {"c": [True]}, "d": Pair(True, False)}
    assert partition(tree, lambda leaf: leaf is None)[0] == {"a": None, "b": {"c": [None]}, "d": Pair(None, HOLE)}


def test_namedtuple_classes_are_found_below_others() -> None:
    assert namedtuple_types([1, {"a": (Pair(1, [Pair(2, 3)]),)}]) == (Pair,)
    assert namedtuple_types({"a": (1, 2), "b": torch.Size([1])}) == ()


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32, torch.bool, torch.float8_e4m3fn, torch.int64])
def test_memory_is_made_and_joined_bit_for_bit_in_every_size(dtype: torch.dtype) -> None:
    made = empty_data([2, 3], dtype, "cpu")
    assert (made.dtype, tuple(made.shape), made.device.type) == (dtype, (2, 3), "cpu")
    assert empty_data((1,), dtype, "meta").is_meta
    bits = torch.arange(made.nbytes, dtype=torch.uint8).remainder(2).view(dtype).view(2, 3)
    joined = join_data(torch.cat, [bits, bits], 1)
    assert (joined.dtype, tuple(joined.shape)) == (dtype, (2, 6))
    assert torch.equal(as_integers(joined[:, 3:]), as_integers(bits))
    assert tuple(join_data(torch.stack, [bits, bits], 2).shape) == (2, 3, 2)


def test_lazily_conjugated_bits_are_resolved() -> None:
    data = torch.tensor([1 + 2j], dtype=torch.complex64)
    assert as_integers(data.conj()).view(torch.complex64).tolist() == [1 - 2j]
    negated = torch._neg_view(torch.tensor([3.0], requires_grad=True))
    assert as_integers(negated).view(torch.float32).tolist() == [-3.0]


def test_a_factory_in_a_factory_is_merged_inside_out() -> None:
    def outer(key: str, data: Any, *_: Any) -> Any:
        return {"a": ShardedTensorFactory(f"{key}.in", data[:2], halves, join_halves), "b": data[2:]}

    factory = ShardedTensorFactory("f", torch.arange(4.0), outer, lambda built: torch.cat([built["a"], built["b"]]))
    loaded = {"x": [{"a": {"parts": [torch.tensor([5.0]), torch.tensor([6.0])]}, "b": torch.tensor([7.0, 8.0])}]}
    merged = apply_factory_merges(loaded, {"x": [factory], "y": 3})
    assert merged["x"][0].tolist() == [5, 6, 7, 8]


def test_integers_are_not_cast_and_factories_are() -> None:
    factory = ShardedTensorFactory("f", torch.arange(4), halves, join_halves)
    tree = {"f": factory, "g": ShardedTensorFactory("g", torch.ones(2), halves, join_halves)}
    half = cast(tree, torch.float16)
    assert half["f"] is factory and half["g"].data.dtype == torch.float16 and half["g"].key == "g"


def test_plain_values_alone_make_no_container_of_a_join() -> None:
    target = {"x": {"y": [HOLE], "z": "w", "v": ("a", "b"), "u": {"t": HOLE}}}
    joined = join({"x": HOLE, "s": 1}, target)
    assert joined == {"x": {"z": "w", "v": ("a", "b"), "u": {}}, "s": 1}
    assert joined["x"]["v"] is target["x"]["v"]
    assert join({"x": [1, 2]}, {"x": {"y": {"z": HOLE}}}) == {"x": [1, 2]}
    assert join({"x": 1}, {"x": [(HOLE, {})]}) == {"x": 1}


def nested(levels: int) -> Options:
    tree: Any = [W]
    for _ in range(levels - 1):
        tree = [tree]
    return Options(tree)


def test_a_hundred_levels_are_searched_for_hidden_shards() -> None:
    refuse_hidden("save", [((), nested(101))])
    with pytest.raises(UnsupportedValue):
        refuse_hidden("save", [((), nested(100))])


def test_structures_of_torch_are_trees_of_their_own_kind() -> None:
    one, other = torch.return_types.topk((W, 1)), torch.return_types.topk((RNG, 1))
    assert not diff(one, torch.return_types.topk((W, 1)))
    assert diff(one, (W, 1)).mismatch == ((),)
    assert diff(one, other)
    with pytest.raises(TreeError, match="don't fit together"):
        combine(torch.return_types.topk((HOLE, 1)), (W, HOLE))
    factory = ShardedTensorFactory("f", torch.arange(4.0), halves, join_halves)
    loaded = torch.return_types.topk(({"parts": [torch.tensor([5.0]), torch.tensor([6.0])]}, 1))
    merged = apply_factory_merges({"a": loaded}, {"a": torch.return_types.topk((factory, 1))})
    assert type(merged["a"]) is torch.return_types.topk and merged["a"][0].tolist() == [5, 6]
    with pytest.raises(TreeError, match="another structure"):
        apply_factory_merges({"a": loaded}, {"a": torch.return_types.sort((factory, 1))})


def test_queues_keep_their_length() -> None:
    assert without_data({"q": deque([W, 1], maxlen=2)})["q"].maxlen == 2


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors_differ_where_their_values_do() -> None:
    one, same, other = (
        torch.quantize_per_tensor(torch.tensor([value]), 0.5, 0, torch.qint8) for value in (1.0, 1.0, 2.0)
    )
    assert not diff({"q": one}, {"q": same})
    assert diff({"q": one}, {"q": other})


def test_thirty_two_factories_may_come_out_of_each_other() -> None:
    def build(key: str, data: Any, *_: Any) -> Any:
        left = int(key)
        return ShardedTensorFactory(str(left - 1), data, build, lambda built: built) if left else W

    assert apply_factories({"a": ShardedTensorFactory("31", W.data, build, lambda built: built)})["a"] is W
    with pytest.raises(TreeError, match="chain of 32 factories"):
        apply_factories({"a": ShardedTensorFactory("32", W.data, build, lambda built: built)})


def test_factories_in_factories_are_merged_by_what_was_built() -> None:
    factory = ShardedTensorFactory("f", torch.arange(4.0), twice, lambda built: torch.cat([built[0], built[1]]))
    expanded, merge = build_factories({"x": factory})
    assert merge(map_shards(lambda shard: shard.data, expanded))["x"].tolist() == [0, 1, 2, 3]


def test_entries_that_were_saved_come_first_in_their_order() -> None:
    assert list(join({"w": HOLE, "v": HOLE}, {"v": "a", "w": "b"})) == ["w", "v"]


def test_what_a_choice_raises_says_where() -> None:
    def choose(path: Any, leaf: Any) -> bool:
        raise ValueError(leaf)

    with pytest.raises(ValueError, match="1") as caught:
        select({"a": [1]}, choose)
    assert caught.value.__notes__ == ["at tree['a'][0]"]


def test_what_is_not_a_tensor_is_joined_by_the_function_itself() -> None:
    assert join_data(lambda parts, dim: (parts, dim), ["a", "b"], 1) == (["a", "b"], 1)

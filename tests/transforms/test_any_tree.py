"""Transforms of any tree: nested dicts, lists, tuples and registered classes, of shards and of plain tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree import transforms
from shardtree.errors import TreeError, UnsupportedValue
from shardtree.testing import check_pure
from shardtree.trees import HOLE, flat, nested
from shardtree.trees import register_dataclass as registered


@registered
@dataclass
class Block:
    qkv: Any
    up: Any
    down: Any


class Pair(NamedTuple):
    model: Any
    opt: Any


Transform = Callable[[Any], Any]
Make = Callable[[str, torch.Tensor], Any]
NAMES = {"qkv": (6, 2), "up": (4, 2), "down": (4, 2)}
PARTS = ["model.h.*.q", "model.h.*.k"]
CASES: dict[str, Transform] = {
    "keep_layers": lambda tree: transforms.keep_layers(tree, "model.h", [2, 0, 0]),
    "stack_layers": lambda tree: transforms.stack_layers(tree, "model.h"),
    "unstack_layers": lambda tree: transforms.unstack_layers(transforms.stack_layers(tree, "model.h"), "model.h"),
    "split_tensor": lambda tree: transforms.split_tensor(tree, "model.h.*.qkv", PARTS, sizes=[4, 2]),
    "merge_tensors": lambda tree: transforms.merge_tensors(tree, ["model.h.*.up", "model.h.*.down"], "model.h.*.up"),
    "pad_tensors": lambda tree: transforms.pad_tensors(tree, ["model.h.*.up"], 7),
    "unpad_tensors": lambda tree: transforms.unpad_tensors(tree, ["model.h.*.up"], 1),
    "transpose_tensors": lambda tree: transforms.transpose_tensors(tree, ["model.h.*.qkv"]),
}


def shard(key: str, data: torch.Tensor) -> st.ShardedTensor:
    return st.ShardedTensor.from_rank_offsets(key, data)


def plain(_: str, data: torch.Tensor) -> torch.Tensor:
    return data


def in_dicts(items: list[Any]) -> dict[str, Any]:
    return {str(number): item for number, item in enumerate(items)}


BLOCKS: dict[str, Callable[[dict[str, Any]], Any]] = {"dict": dict, "class": lambda fields: Block(**fields)}
LAYERS: dict[str, Callable[[list[Any]], Any]] = {"dict": in_dicts, "list": list, "tuple": tuple}
BLOCKS["ordered dict"], LAYERS["numbers"] = OrderedDict, lambda items: dict(enumerate(items))


def state(make: Make, block: Any, layers: Any, seed: int = 0) -> dict[str, Any]:
    """Return a tree of three layers with moments, a value in each, and values beside them."""
    generator = torch.Generator().manual_seed(seed)

    def half(front: str) -> Any:
        return layers(
            [
                block(
                    {
                        name: make(f"{front}.h.{n}.{name}", torch.randn(shape, generator=generator))
                        for name, shape in NAMES.items()
                    }
                )
                for n in range(3)
            ]
        )

    return {"model": {"h": half("model")}, "opt": {"mu": {"h": half("opt.mu")}}, "betas": [0.9, 0.95], "step": 3}


def shown(tree: Any) -> Any:
    """Return a tree that compares by value: its leaves as key, numbers, or values."""

    def one(leaf: Any) -> Any:
        data = leaf.data if isinstance(leaf, st.ShardedTensor) else leaf
        numbers = data.tolist() if isinstance(data, torch.Tensor) else data
        return (leaf.key, leaf.global_shape, numbers) if isinstance(leaf, st.ShardedTensor) else numbers

    return st.map_shards(one, tree)


def commutes_with_flat(transform: Transform, tree: Any) -> None:
    found = {name: leaf for name, leaf in flat(check_pure(transform, tree)).items() if leaf is not HOLE}
    assert shown(found) == shown(transform(flat(tree)))


KINDS = [(block, layers) for block in BLOCKS for layers in LAYERS]


def fits(name: str, block: str) -> bool:
    """A class has no other fields, so that nothing can be split off in it."""
    return block != "class" or name not in {"split_tensor"}


@pytest.mark.slow
@pytest.mark.parametrize("make", [shard, plain])
@pytest.mark.parametrize("name", CASES)
def test_a_transform_of_a_tree_is_that_of_the_flat_one(name: str, make: Make) -> None:
    for block, layers in KINDS:
        if fits(name, block):
            commutes_with_flat(CASES[name], state(make, BLOCKS[block], LAYERS[layers]))


def test_every_transform_is_tried() -> None:
    assert {*transforms.__all__} == {*CASES, "partial_rename"}  # which keeps each leaf in its place


@pytest.mark.parametrize("fault", ["direct values alone", "layers that keep their places"])
def test_the_law_catches_transforms_that_see(fault: str) -> None:
    def of_values(tree: Any) -> Any:
        direct = {name: leaf for name, leaf in tree.items() if isinstance(leaf, (torch.Tensor, st.ShardedTensor))}
        return {**tree, **transforms.keep_layers(direct, "model.h", [0, 2])} if direct else tree

    def in_place(tree: Any) -> Any:
        kept = transforms.keep_layers(tree, "model.h", [0, 2])
        return kept if "model.h.0.up" in tree else {**kept, "model": {"h": [kept["model"]["h"][0], HOLE, HOLE]}}

    with pytest.raises(AssertionError):
        commutes_with_flat(of_values if fault == "direct values alone" else in_place, state(plain, dict, list))


@some.composite
def nested_dicts(draw: some.DrawFn) -> dict[str, Any]:
    """Return dicts in dicts with layers at some depth, and names around them that look alike."""
    layers = {
        str(n): {name: torch.full((4, 2), float(n)) for name in draw(some.sets(some.sampled_from("qw0"), min_size=1))}
        for n in range(3)
    }
    tree: dict[str, Any] = {"h": layers} | draw(some.sampled_from([{}, {"0": 7}, {"norm": torch.ones(2)}]))
    for name in draw(some.lists(some.sampled_from(["h", "0", "m"]), max_size=2)):
        tree = {name: tree, "other": {"w": torch.ones(1)}}
    return tree


@given(nested_dicts(), some.lists(some.integers(0, 2), max_size=4))
def test_of_dicts_it_is_the_nested_transform_of_the_flat_one(tree: dict[str, Any], numbers: list[int]) -> None:
    prefix = next(name for name in flat(tree) if ".0." in f".{name}" and "h.0." in name).rpartition("h.0.")[0] + "h"
    keep = st.bind(transforms.keep_layers, prefix, numbers)
    for change in (keep, st.bind(transforms.pad_tensors, ["**"], 5), st.bind(transforms.transpose_tensors, ["**"])):
        assert shown(change(tree)) == shown(nested(change(flat(tree))))


def test_containers_stay_what_they_are_and_values_are_shared() -> None:
    tree = state(plain, BLOCKS["class"], tuple)
    kept = transforms.keep_layers(tree, "model.h", [2, 0])
    blocks = kept["model"]["h"]
    assert type(blocks) is tuple and [type(block) for block in blocks] == [Block, Block]
    assert blocks[0].up is tree["model"]["h"][2].up and kept["opt"]["mu"]["h"][0].up is tree["opt"]["mu"]["h"][2].up
    assert kept["betas"] is tree["betas"]
    stacked = transforms.stack_layers(tree, "model.h")
    assert isinstance(stacked["model"]["h"], Block) and stacked["model"]["h"].up.shape == (3, 4, 2)


def test_plain_values_of_a_layer_go_with_it() -> None:
    layers = [{"w": torch.full((1,), float(n)), "scale": n, "betas": [n, n]} for n in range(3)]
    steps = {str(n): {"w": {"step": n}} for n in range(3)}
    kept = transforms.keep_layers({"h": layers, "opt": {"state": {"h": steps}}}, "h", [2])
    assert shown(kept) == {
        "h": [{"w": [2], "scale": 2, "betas": [2, 2]}],
        "opt": {"state": {"h": {"0": {"w": {"step": 2}}}}},
    }


def test_what_is_removed_leaves_holes_in_sequences_and_fields_and_nothing_in_dicts() -> None:
    block = Block(*(torch.full((2,), float(n)) for n in range(3)))
    found = transforms.merge_tensors(block, ["qkv", "down"], "qkv")
    assert found.down is HOLE and found.qkv.tolist() == [0, 0, 2, 2] and found.up is block.up
    found = transforms.merge_tensors([*map(torch.ones, (1, 2, 3))], ["2", "0"], "2")
    assert found[0] is HOLE and found[2].tolist() == [1, 1, 1, 1]
    found = transforms.merge_tensors({"a": {"x": torch.ones(1)}, "b": torch.ones(1)}, ["b", "a.x"], "b")
    assert shown(found) == {"b": [1, 1]}


def test_keys_that_say_more_or_less_than_the_place_and_those_that_say_nothing_of_it() -> None:
    def layers(key: str) -> dict[str, Any]:
        return {"m": {"h": [{"w": shard(key.format(n), torch.full((1,), float(n)))} for n in range(3)]}}

    for front in ("", "module.", "m.", "module.m."):
        kept = transforms.keep_layers(layers(front + "h.{}.w"), f"{front}h", [2, 0])
        assert [leaf["w"].key for leaf in kept["m"]["h"]] == [f"{front}h.0.w", f"{front}h.1.w"]
        assert [leaf["w"].data.item() for leaf in kept["m"]["h"]] == [2, 0]
    kept = transforms.keep_layers([shard(f"h.{n}.w", torch.full((1,), float(n))) for n in range(3)], "h", [2, 0])
    assert [leaf if leaf is HOLE else leaf.key for leaf in kept] == ["h.1.w", HOLE, "h.0.w"]


def test_a_registered_tuple_s_fields_are_names() -> None:
    tree = Pair({"h": [torch.zeros(1), torch.ones(1)]}, {"mu": {"h": [torch.zeros(1), -torch.ones(1)]}})
    kept = transforms.keep_layers(tree, "model.h", [1])
    assert isinstance(kept, Pair) and shown(kept) == Pair({"h": [[1.0]]}, {"mu": {"h": [[-1.0]]}})


class Hidden:
    def __init__(self) -> None:
        self.leaf = shard("h.0.w", torch.ones(1))


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: transforms.keep_layers(torch.ones(1), "h", [0]), TreeError, "not a tree\n  found Tensor"),
        (lambda: transforms.keep_layers({"h": Hidden()}, "h", [0]), UnsupportedValue, r"tree\['h'\]: Hidden"),
        (lambda: flat({"h": Hidden()}), UnsupportedValue, r"tree\['h'\]: Hidden"),
        (
            lambda: transforms.split_tensor([Block(*3 * (torch.ones(2),))], "0.up", ["0.gate", "0.up"]),
            TreeError,
            r"entries that a Block cannot have\n  tree\[0\]\['gate'\]",
        ),
        (
            lambda: transforms.stack_layers({"h": [{"w": torch.ones(1), "lr": 1}]}, "h"),
            TreeError,
            r"entries that a list cannot have\n  tree\['h'\]\['w'\]",
        ),
        (
            lambda: transforms.pad_tensors({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, ["**"], 2),
            TreeError,
            "two values would have one name",
        ),
        (
            lambda: transforms.split_tensor([shard("w", torch.ones(2))], "w", ["a", "b"]),
            TreeError,
            r"two values would have the same path, or one would lie under the other\n  found tree\[0\]",
        ),
        (
            lambda: transforms.split_tensor({"w": torch.ones(2), "a": {"x": torch.ones(1)}}, "w", ["a", "b"]),
            TreeError,
            r"two values would have the same path, or one would lie under the other\n  found tree\['a'\]",
        ),
    ],
)
def test_what_has_no_place_is_named(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call()


def test_flat_takes_lists_tuples_classes_and_numbers() -> None:
    block, tensor = Block(torch.ones(1), 2, [3]), torch.zeros(1)
    tree = {"h": [block], "t": (tensor, 1), "state": {0: {"exp_avg": tensor}}, "o": Pair(tensor, 5), "betas": (1, 2)}
    of_layers = {"h.0.qkv": [1.0], "h.0.up": 2, "h.0.down": [3]}
    others = {"t.0": [0.0], "t.1": 1, "state.0.exp_avg": [0.0], "o.model": [0.0], "o.opt": 5, "betas": (1, 2)}
    assert shown(flat(tree)) == of_layers | others
    assert flat([1, {"a": 2}], separator="/") == {"0": 1, "1/a": 2}


def vector(value: float) -> torch.Tensor:
    return torch.full((2,), float(value))


def with_groups(*names: list[str], where: str = "params") -> dict[str, Any]:
    """Return two layers with moments, and groups with the learning rates 1, 2 and so on."""
    moments = {f"h.{n}.w": {"exp_avg": vector(10 + n)} for n in range(2)}
    groups = [{"lr": number, where: those} for number, those in enumerate(names, 1)]
    return {"model": {f"h.{n}.w": vector(n) for n in range(2)}, "optim": {"state": moments, "param_groups": groups}}


def named_in(tree: Any, where: str = "params") -> list[Any]:
    return [group[where] for group in tree["optim"]["param_groups"]]


@pytest.mark.parametrize("where", ["params", "param_names"])
def test_names_in_groups_follow_their_parameters(where: str) -> None:
    apart = with_groups(["h.0.w"], ["h.1.w", "other"], where=where)
    together = with_groups(["x"], ["model.h.1.w", "model.h.0.w"], where=where)
    for tree, numbers, expected in [
        (apart, [1], [[], ["h.0.w", "other"]]),
        (apart, [1, 0, 0], [["h.1.w", "h.2.w"], ["h.0.w", "other"]]),
        (apart, [0, 1], [["h.0.w"], ["h.1.w", "other"]]),
        (together, [1], [["x"], ["model.h.0.w"]]),
    ]:
        kept = check_pure(lambda tree, numbers=numbers: transforms.keep_layers(tree, "model.h", numbers), tree)
        assert named_in(kept, where) == expected
    assert [group["lr"] for group in kept["optim"]["param_groups"]] == [1, 2]
    stacked = transforms.stack_layers(together, "model.h")
    assert named_in(stacked, where) == [["x"], ["model.h.w"]]
    assert named_in(transforms.unstack_layers(stacked, "model.h"), where) == [["x"], ["model.h.0.w", "model.h.1.w"]]
    halves = transforms.split_tensor(apart, "model.h.*.w", ["model.h.*.a", "model.h.*.b"])
    assert named_in(halves, where) == [["h.0.a", "h.0.b"], ["h.1.a", "h.1.b", "other"]]
    assert named_in(transforms.merge_tensors(together, ["model.h.0.w", "model.h.1.w"], "model.w"), where)[1] == [
        "model.w"
    ]
    assert named_in(transforms.pad_tensors(apart, ["model.**"], 3), where) == [["h.0.w"], ["h.1.w", "other"]]


def test_names_in_groups_that_are_in_boxes_or_beside_tensors() -> None:
    boxed = {f"h.{n}.w": shard(f"h.{n}.w", vector(n)) for n in range(2)}
    boxed["groups"] = st.ShardedObject("optim.param_groups", [{"params": ["h.0.w"]}, {"params": ["h.1.w"]}], (1,), (0,))
    assert transforms.keep_layers(boxed, "h", [1])["groups"].data == [{"params": []}, {"params": ["h.0.w"]}]
    renamed = transforms.partial_rename(boxed, {"h.*.w": "h.*.v"})
    assert renamed["groups"].data == [{"params": ["h.0.v"]}, {"params": ["h.1.v"]}]
    tree = with_groups(["h.0.w"], ["h.1.w"])
    tree["optim"]["param_groups"][0]["lr"] = torch.tensor(1.0)
    assert named_in(transforms.keep_layers(tree, "model.h", [1])) == [[], ["h.0.w"]]


def test_names_in_groups_that_cannot_follow_are_refused() -> None:
    with pytest.raises(TreeError, match=r"'optim.param_groups.1.params': stack_layers: 'model.h.w' lacks layers"):
        transforms.stack_layers(with_groups(["h.0.w"], ["h.1.w"]), "model.h")
    two = {"a": {"h.0.w": vector(0)}, "b": {"h.0.w": vector(1)}, "param_groups": [{"params": ["h.0.w"]}]}
    with pytest.raises(TreeError, match=r"'param_groups.0.params': 'h.0.w' may be 'a.h.0.w' or 'b.h.0.w'"):
        transforms.keep_layers(two, "a.h", [0])
    state = {"m": shard("model.a", vector(1)), "o": {"param_groups": [{"params": ["a"]}]}}
    with pytest.raises(TreeError, match=r"'c' is not under 'model\.'"):
        transforms.partial_rename(state, {"model.a": "c"})


def test_beside_shards_plain_tensors_are_values() -> None:
    padded = transforms.pad_tensors({"w": shard("w", vector(0)), "rng": vector(1)}, ["*"], 4)
    assert padded["w"].global_shape == (4,) and padded["rng"].shape == (2,)
    padded = transforms.pad_tensors({"m": {"a": shard("a", vector(0))}, "a": vector(3)}, ["a"], 4)
    assert padded["m"]["a"].global_shape == (4,) and padded["a"].shape == (2,)
    layers = [{"w": shard(f"h.{n}.w", vector(n)), "mask": vector(n)} for n in range(2)]
    assert transforms.keep_layers({"h": layers}, "h", [1])["h"][0]["mask"] is layers[1]["mask"]


@pytest.mark.parametrize("make", [shard, plain])
def test_plain_values_of_layers_that_a_flat_dict_has_not(make: Make) -> None:
    tree = {f"h.{n}.w": make(f"h.{n}.w", vector(n)) for n in range(2)}
    kept = transforms.keep_layers(tree | {"h.5.note": "text", "h.0.note": "a", "h.1.note": "b"}, "h", [1])
    assert {name: kept[name] for name in kept if "note" in name} == {"h.5.note": "text", "h.0.note": "b"}
    with pytest.raises(TreeError, match="no such layers of 'h'\n  5"):
        transforms.keep_layers(tree | {"h.5.note": "text"}, "h", [5])


ALIKE: list[dict[Any, Any]] = [{"x.y": 1, "x": {"y": 2}}, {0: 1, "0": 2}]


@pytest.mark.parametrize("values", ALIKE)
def test_plain_values_may_have_one_name(values: dict[Any, Any]) -> None:
    for tree in (
        {"a": shard("a", vector(0)), "cfg": values},
        {"a": vector(0), **values},
        {"a": vector(0), "b": [values]},
    ):
        padded = transforms.pad_tensors(tree, ["a"], 3)
        assert list(padded) == list(tree) and all(padded[key] == tree[key] for key in tree if key != "a")
    layers = [{"w": vector(n), "cfg": values | {"n": n}} for n in range(2)]
    assert transforms.keep_layers({"h": layers}, "h", [1])["h"][0]["cfg"] == values | {"n": 1}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_sparse_and_lazy_tensors_only_go_with_their_layer() -> None:
    rows = [torch.ones(2), torch.ones(3)]
    others = [torch.nested.nested_tensor(rows, layout=layout) for layout in (torch.jagged, torch.strided)]
    for other in (*others, torch.nn.UninitializedParameter(), torch.ones(2).to_sparse()):
        tree = {"h.0.w": vector(0), "h.1.w": vector(1), "h.1.x": other, "x": other}
        kept = transforms.keep_layers(tree, "h", [1])
        assert kept["h.0.x"] is other and kept["x"] is other
        assert transforms.pad_tensors(tree, ["h.0.w"], 3)["x"] is other


@pytest.mark.parametrize("make", [shard, plain])
def test_the_result_has_containers_of_its_own(make: Make) -> None:
    tree = {"w": make("w", vector(0)), "m": [{"v": make("v", vector(1))}]}
    padded = transforms.pad_tensors(tree, ["w"], 2)
    assert shown(padded) == shown(tree)
    padded["new"], padded["m"][0]["new"] = 1, 1
    assert "new" not in tree and "new" not in tree["m"][0]


@pytest.mark.parametrize("layers", [list, tuple, lambda items: dict(enumerate(items))])
def test_stacked_layers_come_back_as_a_dict(layers: Callable[[list[Any]], Any]) -> None:
    tree = {"h": layers([{"w": vector(n)} for n in range(2)])}
    back = transforms.unstack_layers(transforms.stack_layers(tree, "h"), "h")
    assert shown(back) == {"h": {str(n): {"w": [n, n]} for n in range(2)}}


def test_a_tuple_that_gets_shorter_has_no_hole_at_its_end() -> None:
    tensors = tuple(map(vector, range(3)))
    assert len(transforms.merge_tensors(tensors, ["0", "2"], "0")) == 2
    assert transforms.merge_tensors(tensors, ["0", "1"], "0")[1] is HOLE

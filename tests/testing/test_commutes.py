"""check_commutes: right transforms pass in any layout, and what looks at its own shard alone is caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import shardtree as st
from shardtree.lenses import as_factory, transposed
from shardtree.mapping import ShardedTensor
from shardtree.testing import check_commutes, check_pure, meshes, partition_specs, tensors

STATE = {"w": torch.arange(48.0).view(8, 6), "b": torch.arange(8.0), "step": 3}


def with_factory(tree: Any) -> Any:
    return {**tree, "w": as_factory(tree["w"], transposed())}


RIGHT: dict[str, Callable[[Any], Any]] = {
    "names": st.bind(st.rename, {"w": "weight"}),
    "dtypes": st.bind(st.cast, torch.bfloat16),
    "elements": partial(st.map_data, lambda data: data * 2),
    "a lens": with_factory,
    "another step": lambda tree: {**tree, "step": tree["step"] + 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_right_transforms_commute_with_resharding(name: str) -> None:
    check_commutes(RIGHT[name], STATE, rtol=0, atol=0)


def test_a_transform_that_refuses_some_layouts_commutes_in_others() -> None:
    split = st.bind(st.transforms.split_tensor, "w", ["gate", "up"], sizes=[4, 4])
    columns = [(st.Mesh(tp=ranks), {"w": st.PartitionSpec(None, "tp")}) for ranks in (1, 2, 3)]
    check_commutes(split, {"w": STATE["w"]}, layouts=columns, rtol=0, atol=0)
    with pytest.raises(st.errors.ShapeError, match="'w' is cut along axis 0"):
        check_commutes(split, STATE)


@settings(max_examples=20)
@given(data=some.data())
def test_in_any_layouts_that_are_drawn(data: some.DataObject) -> None:
    state = {"w": data.draw(tensors(dtype=torch.float32))}
    pairs = []
    for _ in range(2):
        mesh = data.draw(meshes(max_ranks=4))
        pairs.append((mesh, data.draw(partition_specs(tuple(state["w"].shape), mesh))))
    check_commutes(st.bind(st.prefix, "model."), state, layouts=pairs, rtol=0, atol=0)


def counting_rows(tree: Any) -> Any:
    return {**tree, "rows": tree["w"].local_shape[0]}


def changing(tree: Any) -> Any:
    tree["w"].data.mul_(1)
    return tree


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a local mean": (
        partial(st.map_data, lambda data: data - data.mean()),
        r"to 2 ranks by rows: rank 0: '[bw]' at tree",
    ),
    "values": (counting_rows, r"to 2 ranks by rows: rank 0: tree\['rows'\]: found 8, expected 4"),
    "its argument": (changing, "changing changed its argument 0"),
}


@pytest.mark.parametrize("tolerances", [{}, {"rtol": 0, "atol": 0}], ids=["rounding", "bits"])
@pytest.mark.parametrize("name", WRONG)
def test_the_law_catches(name: str, tolerances: dict[str, float]) -> None:
    transform, message = WRONG[name]
    with pytest.raises(AssertionError, match=message):
        check_commutes(transform, STATE, **tolerances)


# Rounding, which depends on how sums are cut.

HALVES = [(st.Mesh(dp=ranks), st.PartitionSpec("dp")) for ranks in (1, 2)]


def off_on_the_second_rank(tree: Any, *, by: dict[str, float]) -> Any:
    """Multiply each tensor, on the second rank alone."""
    scale = {key: 1 + by[key] * bool(leaf.global_offset[0]) for key, leaf in tree.items()}
    return {key: replace(leaf, data=leaf.data * scale[key]) for key, leaf in tree.items()}


def test_rounding_is_within_the_default_tolerances_and_not_the_same_bits() -> None:
    rounding = partial(off_on_the_second_rank, by={"w": 2e-7, "v": 4e-7})
    state = {"w": torch.arange(1.0, 9.0), "v": 1000 * torch.arange(1.0, 9.0)}
    check_commutes(rounding, state, layouts=HALVES)
    check_commutes(rounding, state, layouts=HALVES, rtol=0, atol=0.1)
    for exact in ({"rtol": 0, "atol": 0}, {"rtol": 1e-9, "atol": 0}):
        with pytest.raises(AssertionError, match="elements differ"):
            check_commutes(rounding, state, layouts=HALVES, **exact)


def test_the_worst_tensor_is_named_with_its_error_and_the_tolerance() -> None:
    state = {key: torch.arange(1.0, 9.0) for key in ("a", "b", "c")}
    with pytest.raises(AssertionError) as caught:
        check_commutes(partial(off_on_the_second_rank, by={"a": 0.01, "b": 0.5, "c": 0}), state, layouts=HALVES)
    assert str(caught.value) == (
        "from Mesh(dp=1) PartitionSpec('dp') to Mesh(dp=2) PartitionSpec('dp'): rank 1: 'b' at tree['b']: "
        "4 of 4 elements differ by more than rtol=1.3e-06, atol=1e-05; "
        "the worst at (3,): found 8, expected 12, error 4, allowed 2.56e-05 (2 shards differ, this one most)"
    )


SMALL: dict[str, Callable[[Any], Any]] = {
    "a local mean": lambda data: data - data.mean(),
    "zeros in all but the whole": lambda data: data * (data.numel() >= 24),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", SMALL.values(), ids=list(SMALL))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_faults_in_small_tensors_are_caught(fault: Callable[[Any], Any], dtype: torch.dtype) -> None:
    """Such as second moments of Adam, all of which are smaller than torch's absolute tolerance."""
    state = {"v": (torch.arange(24.0).view(6, 4) * 4e-7).to(dtype), "large": torch.ones(24)}
    wrong = partial(st.map_data, fault)
    with pytest.raises(AssertionError, match=r"'v' at .*elements differ by more than rtol="):
        check_commutes(wrong, {"v": state["v"]})
    check_commutes(wrong, {"v": state["v"]}, atol=1e-4)
    check_commutes(partial(st.map_data, lambda data: data * 2), state)


def test_a_shard_of_small_elements_has_the_tolerance_of_the_whole_tensor() -> None:
    rounding = partial(st.map_data, lambda data: data + 1e-8 * data.numel())
    rows = torch.tensor([0.0, 0.0, 0.0, 1.0])
    check_commutes(rounding, {"w": rows}, layouts=HALVES)
    with pytest.raises(AssertionError, match="elements differ"):
        check_commutes(rounding, {"w": 1e-3 * rows}, layouts=HALVES)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_integers_and_bools_are_exact_whatever_the_tolerances(dtype: torch.dtype) -> None:
    def flipping(tree: Any) -> Any:
        return st.map_data(lambda data: ~data if tree["w"].global_offset[0] else data, tree)

    with pytest.raises(AssertionError, match="4 of 4 elements differ, the first one"):
        check_commutes(flipping, {"w": torch.ones(8, dtype=dtype)}, layouts=HALVES, rtol=1e3, atol=1e3)


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf"), "0", True])
def test_what_is_no_tolerance_is_refused(wrong: Any) -> None:
    with pytest.raises(st.errors.MetadataError, match=r"atol[\s\S]*a finite number of at least 0"):
        check_commutes(lambda tree: tree, STATE, atol=wrong)


# Registered classes.


@st.trees.register_dataclass
@dataclass(frozen=True)
class Layer:
    w: Any
    b: Any


class Plain:
    """A class without an equality of its own, registered with optree, and with a name that isn't part of the tree."""

    def __init__(self, w: Any, b: Any, name: str = "plain") -> None:
        self.w, self.b, self.name = w, b, name


register: Any = optree.register_pytree_node
register(
    Plain,
    lambda node: ((node.w, node.b), node.name, ("w", "b")),
    lambda name, pair: Plain(*pair, name),
    namespace="shardtree",
)
NODES: list[Any] = [Layer, Plain, lambda w, b: (w, [b])]


@pytest.mark.slow
@pytest.mark.parametrize("make", NODES)
def test_states_of_any_class_are_checked(make: Callable[..., Any]) -> None:
    state = {"p": make(STATE["w"], {"deep": make(STATE["b"], 3)}), "step": 3}
    check_commutes(st.bind(st.prefix, "model."), state, rtol=0, atol=0)
    with pytest.raises(AssertionError, match="elements differ"):
        check_commutes(WRONG["a local mean"][0], state)


@dataclass(frozen=True)
class Counted:
    w: Any
    rows: int = 0


st.trees.register_dataclass(Counted, static=["rows"])

HIDDEN: dict[str, Callable[[Any], Any]] = {
    "a static field": lambda tree: {**tree, "p": replace(tree["p"], rows=tree["p"].w.local_shape[0])},
    "a registered class's data": lambda tree: {**tree, "p": Plain(tree["p"].w, 3, str(tree["p"].w.local_shape))},
    "the kind of a container": lambda tree: {"p": ([], ())[tree["p"].w.local_shape[0] > 4], "w": tree["p"].w},
}


@pytest.mark.parametrize("fault", HIDDEN.values(), ids=list(HIDDEN))
def test_what_containers_have_beside_their_entries_is_compared(fault: Callable[[Any], Any]) -> None:
    state = {"p": Counted(STATE["w"])}
    check_commutes(lambda tree: {"p": replace(tree["p"], rows=8)}, state, rtol=0, atol=0)
    with pytest.raises(AssertionError, match=r"from one rank to 2 ranks by rows: tree\['p'\]: found .*, expected "):
        check_commutes(fault, state)


def emptying(node: Plain) -> Plain:
    node.w = None
    return node


def scaling(node: Plain) -> Plain:
    node.w.mul_(2)
    return node


def test_changes_inside_of_registered_classes_are_seen() -> None:
    for fault in (emptying, scaling):
        with pytest.raises(AssertionError, match=f"{fault.__name__} changed its argument 0 at argument"):
            check_pure(fault, Plain(torch.ones(2), 1))
    check_pure(lambda node: Plain(node.w, 2), Plain(torch.ones(2), 1))
    numbers = iter(range(9))
    for again in (lambda: Plain(next(numbers), 1), lambda: Plain(1, 1, str(next(numbers)))):
        with pytest.raises(AssertionError, match="returned another value"):
            check_pure(again)


def test_given_layouts_are_named() -> None:
    pairs = [(st.Mesh(dp=2), st.PartitionSpec("dp")), (st.Mesh(tp=2), st.PartitionSpec())]
    with pytest.raises(
        AssertionError, match=r"from Mesh\(dp=2\) PartitionSpec\('dp'\) to Mesh\(tp=2\) PartitionSpec\(\)"
    ):
        check_commutes(WRONG["a local mean"][0], {"w": torch.arange(4.0)}, layouts=pairs)


@given(data=some.data())
def test_simple_specs_cut_evenly_along_one_axis_each(data: some.DataObject) -> None:
    mesh = data.draw(meshes(simple=True))
    shape = data.draw(some.sampled_from([(), (4,), (6, 4), (5, 12, 2)]))
    spec = data.draw(partition_specs(shape, mesh, simple=True))
    assert list(mesh.ranks) == list(range(mesh.size))
    assert not spec.at and all(axis is None or isinstance(axis, str) for axis in spec.entries)
    trees = st.shard({"w": torch.zeros(shape)}, mesh, spec)
    shards = [leaf for tree in trees for _, leaf in st.trees.leaves_with_paths(tree)]
    assert all(isinstance(leaf, ShardedTensor) for leaf in shards)
    assert (len(shards), len({leaf.local_shape for leaf in shards})) == (mesh.size, 1)

"""reshard in memory: what saving and loading give, for every layout; and back; and nothing that is given changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import shardtree
from shardtree.layouts import AxisSplit, Mesh, PartitionSpec, shard
from shardtree.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
from shardtree.testing import (
    STORABLE_DTYPES,
    GlobalState,
    Layout,
    check_pure,
    check_reshard,
    check_ways,
    global_states,
    glu,
    meshes,
    outline,
    partition_specs,
    random_bits,
    rank_tree,
    shapes,
    state_layouts,
    target_tree,
    tensors,
    transposed,
)
from shardtree.trees import map_shards
from tests.live.recast import recast_states

# What torch says, once, when it makes a tensor of half-precision complex numbers.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

EXAMPLES = settings.default.max_examples if settings.default else 100

Layouts = Mapping[str, Layout]
W = ShardedTensor.from_rank_offsets("w", torch.zeros(2))


def ranks_of(layout: Layouts) -> int:
    return next(iter(layout.values())).ranks


def trees_of(state: GlobalState, layout: Layouts) -> list[Any]:
    return [rank_tree(state, layout, rank) for rank in range(ranks_of(layout))]


def targets_of(state: GlobalState, layout: Layouts) -> list[Any]:
    return [target_tree(state, layout, rank) for rank in range(ranks_of(layout))]


@pytest.mark.slow
@settings(max_examples=EXAMPLES // 2)
@given(data=st.data())
def test_resharding_with_a_cast_gives_what_torch_converts_to(data: st.DataObject) -> None:
    state, wanted = data.draw(recast_states(), label="states")
    one, other = (data.draw(state_layouts(state, data.draw(st.integers(1, 5)))) for _ in range(2))
    check_reshard(trees_of(state, one), targets_of(wanted, other), reshard=partial(shardtree.reshard, cast=True))


def by_way_of_bfloat16(trees: list[Any], targets: list[Any], **options: Any) -> list[Any]:
    """Round to another dtype on the way."""
    return shardtree.reshard([shardtree.cast(tree, torch.bfloat16) for tree in trees], targets, **options)


CAST_ENDS = (
    shard({"w": torch.arange(16.0).view(4, 4) + 0.1}, Mesh(dp=2), PartitionSpec("dp")),
    shardtree.abstract({"w": torch.zeros(4, 4, dtype=torch.float64)}, Mesh(tp=2), PartitionSpec(None, "tp")),
)


def test_the_law_of_casts_catches_a_way_over_another_dtype() -> None:
    check_reshard(*CAST_ENDS, reshard=partial(shardtree.reshard, cast=True))
    with pytest.raises(AssertionError, match="of 8 elements differ"):
        check_reshard(*CAST_ENDS, reshard=partial(by_way_of_bfloat16, cast=True))


def test_nans_stay_nans() -> None:
    """Which NaN, torch says otherwise for few elements than for many: that is as it is."""
    data = random_bits((40,), torch.float32, 5)
    trees = [{"w": ShardedTensor.from_rank_offsets("w", data)}]
    (found,) = shardtree.reshard(trees, [shardtree.cast(trees[0], torch.bfloat16)], cast=True)
    assert data.isnan().any() and torch.equal(found["w"].data.isnan(), data.isnan())


@pytest.mark.parametrize(
    ("value", "before", "after"),
    [(300, torch.int64, torch.uint8), (-1, torch.int8, torch.uint16), (2**63, torch.uint64, torch.int64)],
)
def test_an_integer_that_does_not_fit_is_an_error(value: int, before: torch.dtype, after: torch.dtype) -> None:
    data = torch.tensor([1, value, 2], dtype=before)[::2]  # one that nobody wants doesn't matter
    trees, target = [{"w": ShardedTensor.from_rank_offsets("w", data)}], torch.zeros(2, dtype=after)
    shardtree.reshard(trees, [{"w": ShardedTensor.from_rank_offsets("w", target)}], cast=True)
    trees = [{"w": ShardedTensor.from_rank_offsets("w", torch.tensor([1, value], dtype=before))}]
    with pytest.raises(shardtree.errors.ShapeError, match=f"reshard: 'w' cannot be converted[\\s\\S]*{value}"):
        shardtree.reshard(trees, [{"w": ShardedTensor.from_rank_offsets("w", target)}], cast=True)


def test_a_lazy_conjugate_is_converted_as_what_it_says() -> None:
    data = torch.complex(torch.arange(4.0), torch.ones(4)).conj()
    target = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4, dtype=torch.complex128))}
    (found,) = shardtree.reshard([{"w": ShardedTensor.from_rank_offsets("w", data)}], [target], cast=True)
    assert torch.equal(found["w"].data, data.to(torch.complex128).resolve_conj())


def test_one_dtype_for_all_ranks_that_want_a_tensor() -> None:
    tree = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2))}
    wanted = [shardtree.cast(tree, dtype) for dtype in (torch.float16, torch.bfloat16)]
    with pytest.raises(shardtree.errors.IntegrityError, match=r"'w'[\s\S]*float16[\s\S]*bfloat16"):
        shardtree.reshard([tree], wanted, cast=True)


@pytest.mark.slow
@settings(max_examples=EXAMPLES // 2)
@given(data=st.data())
def test_reshard_there_and_back_is_the_identity(data: st.DataObject) -> None:
    state = data.draw(global_states(), label="state")
    one, other = (data.draw(state_layouts(state, data.draw(st.integers(1, 5)))) for _ in range(2))
    check_reshard(trees_of(state, one), data.draw(st.sampled_from([targets_of, trees_of]))(state, other))


@pytest.mark.slow
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_reshard_between_meshes(data: st.DataObject) -> None:
    """Uneven, strided and joint cuts, tensors on some ranks alone, ranks in any order, groups that overlap or don't."""
    keys = st.sampled_from(["w", "b"])
    whole = data.draw(st.dictionaries(keys, tensors(shapes(max_axes=3)), min_size=1), label="tensors")
    ends = []
    for _ in range(2):
        mesh = data.draw(meshes(), label="mesh")
        specs = {key: data.draw(partition_specs(tuple(tensor.shape), mesh)) for key, tensor in whole.items()}
        ends.append(dict(zip(mesh.ranks, shard(whole, mesh, specs), strict=True)))
    check_reshard(*ends)


@pytest.mark.slow
def test_every_dtype_is_resharded_bit_for_bit() -> None:
    for number, dtype in enumerate(STORABLE_DTYPES):
        whole = {"w": random_bits((4, 6, 2), dtype, number + 1)}
        strided = PartitionSpec((AxisSplit("dp", 2), AxisSplit("tp")))
        check_reshard(shard(whole, Mesh(dp=2, tp=2), strided), shard(whole, Mesh(tp=3), PartitionSpec(None, "tp")))


def sharing(trees: Any, targets: Any) -> Any:
    """Give the source's own tensors where they would do."""
    same = shardtree.without_data(trees) == shardtree.without_data(targets)
    return [dict(tree) for tree in trees] if same else shardtree.reshard(trees, targets)


def scaling(trees: Any, targets: Any) -> Any:
    """Write to the source's tensors."""
    found = shardtree.reshard(trees, targets)
    next(iter(trees))["w"].data.mul_(1)
    return found


def flipping(trees: Any, targets: Any) -> Any:
    """Change one bit."""
    found = shardtree.reshard(trees, targets)
    found[-1]["w"].data.view(torch.uint8).view(-1)[-1] ^= 1
    return found


def one_way(trees: Any, targets: Any) -> Any:
    """Lose a tree's plain values on the way back."""
    found = shardtree.reshard(trees, targets)
    return found if isinstance(targets, list) else {rank: {"w": tree["w"]} for rank, tree in found.items()}


def check_both(trees: Any, targets: tuple[Any, Any], reshard: Callable[..., Any]) -> None:
    for each in targets:
        check_reshard(trees, each, reshard=reshard)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (sharing, "rank 0 shares memory with an argument"),
        (scaling, "changed its argument 0"),
        (flipping, "1 of 4 elements differ"),
        (one_way, "there and back, tree..step.. differs"),
    ],
)
def test_the_law_catches(fault: Callable[..., Any], message: str) -> None:
    whole = {"w": random_bits((4, 4), torch.float32, 1), "step": 3}
    by_rows, by_both = (
        shard(whole, Mesh(dp=2, tp=2), spec) for spec in (PartitionSpec(("dp", "tp")), PartitionSpec("tp", "dp"))
    )
    check_both(by_rows, (by_both, by_rows), shardtree.reshard)
    with pytest.raises(AssertionError, match=message):
        check_both(by_rows, (by_both, by_rows), fault)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_factories_come_back_with_merged_data(dtype: torch.dtype) -> None:
    gates, matrix = random_bits((8, 6), dtype, 1), random_bits((6, 4), dtype, 2)

    def trees(ranks: int) -> list[Any]:
        halves = [torch.stack([*gates.view(torch.uint8).chunk(2)]).chunk(ranks, 1)[rank] for rank in range(ranks)]
        return [
            {
                "gate": glu("gate", half.reshape(-1, half.shape[-1]).view(dtype), rank, ranks),
                "t": transposed("t", matrix.chunk(ranks)[rank], (1, rank, ranks)),
            }
            for rank, half in enumerate(halves)
        ]

    check_reshard(trees(2), trees(1))
    found = shardtree.reshard(trees(2), trees(1))
    expected = trees(1)[0]
    assert isinstance(found[0]["gate"], ShardedTensorFactory)
    assert found[0]["gate"].merge_fn is not None
    for key in ("gate", "t"):
        assert outline(found[0][key].data) == outline(expected[key].data)
    check_ways(trees(2), trees(1))


def test_a_factory_gets_the_plain_values_that_it_built() -> None:
    def build(key: str, data: Any, replica_id: Any, flat: Any) -> Any:
        return {"w": ShardedTensor.from_rank_offsets(key, data), "scale": 4.0}

    factory = ShardedTensorFactory("w", torch.ones(2), build, lambda tree: tree["w"] * tree["scale"])
    (found,) = shardtree.reshard([{"f": factory}], [{"f": factory}])
    assert found["f"].data.tolist() == [4.0, 4.0]


def test_objects_that_a_factory_makes_are_merged_as_their_values() -> None:
    def build(key: str, data: Any, *_: Any) -> Any:
        return {"w": replace(W, data=data), "o": ShardedObject("o", {"step": 3}, (1,), (0,))}

    factory = ShardedTensorFactory("f", torch.ones(2), build, lambda built: (built["o"], built["w"].sum().item()))
    (tree,) = shardtree.reshard([{"f": factory}], [{"f": factory}])
    assert tree["f"].data == ({"step": 3}, 2)


def test_where_nobody_has_plain_values_a_target_keeps_its_own() -> None:
    (tree,) = shardtree.reshard([{}], [{"step": LocalNonpersistentObject(3)}])
    assert tree["step"].unwrap() == 3


def test_new_memory_is_made_where_the_target_or_its_source_is() -> None:
    made: list[str] = []

    def empty(shape: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append(device.type)
        return torch.empty(shape, dtype=dtype)

    for target in (W, W.without_data(), replace(W, data=torch.empty(2, device="meta"))):
        shardtree.reshard([{"w": W}], [{"w": target}], empty=empty)
    assert made == ["cpu"] * 3


def test_ranks_may_be_named_and_results_are_alike() -> None:
    whole = torch.arange(4.0)
    trees = {
        7: {"w": ShardedTensor.from_rank_offsets("w", whole[:2], (0, 0, 2)), "step": 3},
        3: {"w": ShardedTensor.from_rank_offsets("w", whole[2:], (0, 1, 2)), "step": 3},
        9: {"step": 3},
        1: {},
    }
    targets = {20: {"w": ShardedTensor.from_rank_offsets("w", torch.empty(4, device="meta"))}, 11: {}}
    found = shardtree.reshard(trees, targets)
    assert list(found) == [20, 11]
    assert found[20]["w"].data.tolist() == [0, 1, 2, 3]
    assert found[11] == {"step": 3}


def test_plain_values_are_copied_for_each_rank() -> None:
    shared = {"seen": [1], "ema": torch.zeros(2)}
    trees = [{"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2)), "common": shared}]
    target = {"w": trees[0]["w"], "common": {"seen": [9, 9]}}
    one, other = shardtree.reshard(trees, [target, replace_replica(target)])
    assert one["common"]["seen"] == other["common"]["seen"] == [1]
    places = {id(tree["common"]["seen"]) for tree in (trees[0], one, other)}
    memory = {tree["common"]["ema"].data_ptr() for tree in (trees[0], one, other)}
    assert (len(places), len(memory)) == (3, 3)


def replace_replica(tree: Any) -> Any:
    return map_shards(lambda leaf: replace(leaf, replica_id=1) if isinstance(leaf, ShardedTensor) else leaf, tree)


@pytest.mark.parametrize(
    "data",
    [
        torch.arange(24.0).view(6, 4).T,
        torch.arange(48.0).view(4, 12)[:, 1::2],
        torch.arange(6.0).expand(4, 6),
        torch.complex(torch.arange(24.0), torch.ones(24)).view(4, 6).conj(),
        torch.arange(24.0).view(4, 6).requires_grad_(),
    ],
    ids=["transposed", "steps", "expanded", "lazy conjugate", "gradients"],
)
def test_sources_are_read_through_their_strides(data: torch.Tensor) -> None:
    trees = [{"w": ShardedTensor.from_rank_offsets("w", data)}]
    targets = [{"w": ShardedTensor.from_rank_offsets("w", data[:, part : part + 1], (1, part, 6))} for part in range(6)]
    found = check_pure(shardtree.reshard, trees, targets)
    for part, tree in enumerate(found):
        assert outline(tree["w"].data) == outline(data[:, part : part + 1].detach())
        assert not tree["w"].data.requires_grad


def test_a_stretched_flat_source() -> None:
    data = torch.arange(20.0)[1::2]
    trees = [
        {"w": ShardedTensor.from_rank_offsets_flat("w", part, (4, 5), flattened_range=slice(start, start + 10))}
        for start, part in ((0, data), (10, -data))
    ]
    targets = [{"w": ShardedTensor.from_rank_offsets("w", torch.empty(4, 1), (1, part, 5))} for part in range(5)]
    whole = torch.cat([data, -data]).view(4, 5)
    for part, tree in enumerate(shardtree.reshard(trees, targets)):
        assert torch.equal(tree["w"].data, whole[:, part : part + 1])


def test_objects_go_by_rules() -> None:
    trees = [{"seen": ShardedObject("seen", [rank, rank + 10], (2,), (rank,))} for rank in range(2)]
    targets = [{"seen": ShardedObject("seen", None, (3,), (rank,))} for rank in range(3)]
    found = shardtree.reshard(trees, targets, rules={"seen": shardtree.objects.redistribute_objects})
    assert [tree["seen"].data for tree in found] == [[0, 10], [1], [11]]
    with pytest.raises(shardtree.errors.IntegrityError, match="no rule covers them"):
        shardtree.reshard(trees, targets)


def test_a_tensor_that_was_changed_is_an_error() -> None:
    data = torch.zeros(2, 3)
    trees = [{"w": ShardedTensor.from_rank_offsets("w", data)}]
    data.t_()
    with pytest.raises(shardtree.errors.ShapeError, match="changed after its shard was built"):
        shardtree.reshard(trees, [{"w": W}])


class Counting(TorchDispatchMode):
    """Counts the bytes that torch copies, and those of the memory that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.copied = self.made = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function.overloadpacket == torch.ops.aten.copy_:
            self.copied += found.nbytes
        elif isinstance(found, torch.Tensor) and function.overloadpacket in (
            torch.ops.aten.empty,
            torch.ops.aten.clone,
        ):
            self.made += found.nbytes
        return found


SEEN: Callable[..., Any] = shardtree.reshard.__wrapped__  # type: ignore[attr-defined]
"""`reshard` without the shield that keeps torch's modes, the counting one too, from what it does."""


def check_copied_once(trees: Any, targets: Any, reshard: Callable[..., Any] = SEEN) -> None:
    with Counting() as counted:
        found = reshard(trees, targets)
    held = sum(leaf.data.nbytes for tree in found for _, leaf in shardtree.trees.leaves_with_paths(tree))
    assert (counted.copied, counted.made) == (held, held), f"of {held}: {counted.copied} copied, {counted.made} made"


def by_way_of_copies(trees: Any, targets: Any) -> Any:
    return SEEN([shardtree.map_data(torch.clone, tree) for tree in trees], targets)


def test_each_byte_is_copied_once_and_no_other_memory_is_made() -> None:
    whole = {"w": torch.arange(60.0).view(10, 6), "b": torch.arange(7, dtype=torch.int8)}
    by_rows, by_columns = PartitionSpec("dp"), {"w": PartitionSpec(None, "tp"), "b": PartitionSpec()}
    ends = shard(whole, Mesh(dp=4), by_rows), shard(whole, Mesh(dp=2, tp=3), by_columns)
    check_copied_once(*ends)
    check_copied_once(*ends[::-1])
    with pytest.raises(AssertionError, match="of 522: 522 copied, 769 made"):
        check_copied_once(*ends, by_way_of_copies)

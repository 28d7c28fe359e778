"""DTensors become our shards and come back, on any mesh, with any placements; every rank knows what all hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

import shardtree as st
from shardtree.core.layouts import tensor_shards, tree_columns
from shardtree.errors import CheckpointingException, IntegrityError, ShapeError, TreeError, UnsupportedValue
from shardtree.interop.dtensor import dtensor_layout, from_dtensors, spec_of, to_dtensors
from shardtree.layouts import AxisSplit, PartitionSpec
from shardtree.storage import MemoryStorage
from shardtree.testing import check_pure
from tests.core.trees.samples import assert_caught
from tests.interop.dtensor_cases import Case, as_fsdp2, cases, numbered
from tests.options import save_keywords

pytestmark = pytest.mark.peers


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.tolist()


# What each rank holds


def check_shards(convert: Callable[[Any], Any], case: Case) -> None:
    """Check that the shards of all ranks have main replicas for each element once, and hold what stands there."""
    trees = {rank: convert({"w": dtensor}) for rank, dtensor in case.dtensors().items()}
    assert st.core.layouts.access_problems(tree_columns(trees)) == ()
    for tree in trees.values():
        for shard in tensor_shards(tree):
            assert torch.equal(shard.data, case.whole[shard.global_slice()])


def from_written(tree: Any) -> Any:
    return from_dtensors(tree, strided="dtensor")


@pytest.mark.slow
@given(cases())
def test_each_rank_holds_what_its_shards_say(case: Case) -> None:
    check_shards(from_written, case)


def without_strides(tree: Any) -> Any:
    """The planted fault: a strided cut that is taken for a plain one."""

    def plain(dtensor: DTensor) -> DTensor:
        placements = [Shard(each.dim) if hasattr(each, "split_factor") else each for each in dtensor.placements]
        local, whole = dtensor.to_local(), {"shape": dtensor.shape, "stride": dtensor.stride()}
        return DTensor.from_local(local, dtensor.device_mesh, placements, **whole)

    return from_dtensors({"w": plain(tree["w"])})


def all_main(tree: Any) -> Any:
    """The planted fault: replicas that aren't told apart."""
    return st.map_shards(lambda leaf: replace(leaf, replica_id=0), from_written(tree))


def test_the_law_of_shards_catches() -> None:
    assert_caught(check_shards, all_main, cases())


def check_peer(convert: Callable[[Any], Any], case: Case) -> None:
    for rank, dtensor in case.dtensors().items():
        shape, offset = compute_local_shape_and_global_offset(case.whole.shape, case.mesh(rank), case.placements)
        leaf = convert({"w": dtensor})["w"]
        assert tuple(leaf.data.shape) == shape
        if 0 not in shape:
            first = min(shard.global_offset for shard in tensor_shards({"w": leaf}))
            assert first == offset
            if isinstance(leaf, st.ShardedTensor):
                assert (leaf.local_shape, leaf.global_offset) == (shape, offset)


@given(cases())
def test_shapes_and_offsets_are_those_that_torch_computes(case: Case) -> None:
    check_peer(from_written, case)


def test_the_law_of_offsets_catches_strides_that_are_ignored() -> None:
    assert_caught(check_peer, without_strides, cases())


# What all ranks hold


Rows = list[tuple[Any, ...]]


def rows(columns: st.layouts.ShardColumns) -> Rows:
    lists = (columns.offset, columns.shape, columns.start, columns.stop, columns.rank, columns.main)
    each = zip(columns.key.tolist(), *(column.tolist() for column in lists), strict=True)
    return sorted((columns.keys[key], str(columns.kinds[key]), *rest) for key, *rest in each)


def check_layout(layout: Callable[[Any], st.layouts.ShardColumns], case: Case) -> None:
    dtensors = case.dtensors()
    held = rows(tree_columns({rank: from_written({"w": dtensor}) for rank, dtensor in dtensors.items()}))
    for dtensor in dtensors.values():
        assert rows(layout({"w": dtensor, "step": torch.tensor(1)})) == held


@given(cases())
def test_every_rank_knows_what_all_ranks_hold(case: Case) -> None:
    check_layout(lambda tree: dtensor_layout(tree, strided="dtensor"), case)


def own_alone(tree: Any) -> st.layouts.ShardColumns:
    """The planted fault: a layout of one rank's shards."""
    return tree_columns([from_written(tree)])


def test_the_law_of_layouts_catches_one_ranks_shards() -> None:
    assert_caught(check_layout, own_alone, cases())


# There and back


def check_round_trip(back: Callable[[Any, Any], Any], case: Case) -> None:
    for dtensor in case.dtensors().values():
        dtensor.requires_grad_(dtensor.dtype.is_floating_point)
        tree = {"model": [dtensor], "step": 3}
        again = back(from_written(tree), tree)
        assert again["step"] == 3
        found = again["model"][0]
        assert isinstance(found, DTensor)
        assert bits(found.to_local()) == bits(dtensor.to_local())
        assert (found.placements, found.shape, found.stride()) == (case.placements, dtensor.shape, dtensor.stride())
        assert found.device_mesh is dtensor.device_mesh and found.requires_grad == dtensor.requires_grad
        assert not found.numel() or found.to_local().untyped_storage() is not None


@given(cases())
def test_to_undoes_from(case: Case) -> None:
    check_round_trip(lambda tree, like: to_dtensors(tree, like=like), case)


def evenly(tree: Any, like: Any) -> Any:
    """The planted fault: a global shape that is taken to be a multiple of the local one."""
    one = like["model"][0]
    local = tree["model"][0].data
    return {**tree, "model": [DTensor.from_local(local, one.device_mesh, one.placements)]}


def test_the_law_of_round_trips_catches_shapes_that_are_guessed() -> None:
    assert_caught(check_round_trip, evenly, cases())


def check_reload(save: Callable[..., Any], saved: Case, loaded: Case) -> None:
    """Check that what is saved on one mesh is loaded on another one, with and without an exchange of layouts."""
    loaded = replace(loaded, whole=torch.zeros_like(saved.whole))
    loaded = replace(loaded, placements=tuple(fitting(each, saved.whole.ndim) for each in loaded.placements))
    folder, full = MemoryStorage(), replace(loaded, whole=saved.whole)
    source, target = saved.dtensors(), loaded.dtensors()

    def save_own(world: st.World) -> None:
        tree = {"w": source[world.rank]}
        save(from_written(tree), folder, world=world, layout=dtensor_layout(tree, strided="dtensor"))

    def load_own(world: st.World) -> Any:
        tree = {"w": target[world.rank]}
        layout = dtensor_layout(tree, strided="dtensor")
        found = st.load(
            from_written(tree), folder, world=world, layout=layout, options=st.LoadOptions(exchange="always")
        )
        return to_dtensors(found, like=tree)["w"].to_local()

    st.simulate(len(source), save_own)
    for rank, found in enumerate(st.simulate(len(target), load_own)):
        assert torch.equal(found, full.dtensor(rank).to_local())


def fitting(placement: Any, axes: int) -> Any:
    return placement if placement.is_replicate() or placement.dim < axes else Replicate()


@pytest.mark.slow
@given(cases(), cases())
def test_what_is_saved_on_one_mesh_is_loaded_on_another(saved: Case, loaded: Case) -> None:
    check_reload(st.save, saved, loaded)


def in_boxes_that_touch(tree: Any, folder: Any, **options: Any) -> None:
    """The planted fault: several boxes that are written as if they were one, from the first one's offset on."""

    def as_one(leaf: Any) -> Any:
        shards = tensor_shards({"w": leaf})
        return replace(shards[0], data=shards[-1].data) if len({s.local_shape for s in shards}) == 1 else leaf

    options["layout"] = None
    st.save(st.map_shards(as_one, tree), folder, **save_keywords(**options))


@pytest.mark.slow
def test_the_law_of_reloading_catches_several_boxes_that_are_taken_for_one() -> None:
    assert_caught(check_reload, in_boxes_that_touch, cases(), cases())


@given(cases())
def test_nothing_is_changed(case: Case) -> None:
    tree = {"w": case.dtensor(int(case.ranks.flatten()[0]))}
    kept, local = dict(tree), tree["w"].to_local()
    before = bits(local), local._version
    check_pure(to_dtensors, from_written(tree), {})
    to_dtensors(from_written(tree), like=tree)
    assert (bits(local), local._version) == before
    assert tree.keys() == kept.keys() and tree["w"] is kept["w"]


# Meshes and specs


SQUARE = torch.arange(4).view(2, 2)


def on_square(whole: torch.Tensor, *placements: Any, rank: int = 0) -> DTensor:
    return Case(whole, SQUARE, ("dp", "tp"), placements).dtensor(rank)


def test_cuts_of_one_axis_follow_each_other() -> None:
    cut = on_square(numbered((8, 3)), _StridedShard(0, split_factor=2), Shard(0))
    assert spec_of(cut) == PartitionSpec((AxisSplit("dp", 2), AxisSplit("tp")), None)
    assert spec_of(on_square(numbered((8, 3)), Replicate(), Shard(-1))) == PartitionSpec(None, "tp")


def slice_of_square(rank: int, axis: int) -> DeviceMesh:
    """Return the ranks that differ from a rank along one axis alone, as a sub-mesh holds them."""
    line = SQUARE[:, rank % 2] if axis == 0 else SQUARE[rank // 2]
    return DeviceMesh("cpu", line, mesh_dim_names=(("dp", "tp")[axis],), _init_backend=False, _rank=rank)


def within_square(rank: int) -> DeviceMesh:
    return DeviceMesh("cpu", SQUARE, mesh_dim_names=("dp", "tp"), _init_backend=False, _rank=rank)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_tensor_on_a_slice_is_replicated_along_the_other_axes(axis: int) -> None:
    trees, layouts = {}, []
    for rank in range(4):
        tree = {"w": DTensor.from_local(numbered((3,)) + rank // 2, slice_of_square(rank, axis), [Shard(0)])}
        trees[rank] = from_dtensors(tree, within=within_square(rank))
        layouts.append(rows(dtensor_layout(tree, within=within_square(rank))))
    mains = [rank for rank, tree in trees.items() if st.is_main_replica(tree["w"].replica_id)]
    assert mains == [[0, 2], [0, 1]][axis]
    assert layouts == [rows(tree_columns(trees))] * 4
    assert st.core.layouts.access_problems(tree_columns(trees)) == ()


def test_what_this_rank_has_no_part_in_is_left_out_and_comes_back_as_it_was() -> None:
    stages = [DeviceMesh("cpu", ranks, _init_backend=False, _rank=2) for ranks in ([0, 1], [2, 3])]
    first, second = (DTensor.from_local(numbered((3,)), mesh, [Shard(0)], shape=(6,), stride=(1,)) for mesh in stages)
    tree = {"first": {"w": first}, "second": {"w": second}, "pair": [first, second]}
    shards = from_dtensors(tree)
    assert shards["first"] == {} and shards["pair"][0] is st.trees.HOLE
    again = to_dtensors(shards, like=tree)
    assert again["first"]["w"] is first and again["pair"][0] is first
    assert torch.equal(again["second"]["w"].to_local(), second.to_local())
    assert sorted(set(dtensor_layout(tree).rank.tolist())) == [0, 1, 2, 3]


# FSDP2 over tensor parallelism


@given(some.integers(0, 40), some.tuples(some.integers(1, 4), some.integers(1, 4)))
def test_fsdp2_cuts_what_tensor_parallelism_left(size: int, sizes: tuple[int, int]) -> None:
    ranks = torch.arange(sizes[0] * sizes[1]).view(*sizes)
    case = Case(numbered((size,)), ranks, ("dp", "tp"), (_StridedShard(0, split_factor=sizes[1]), Shard(0)))
    check_fsdp2(lambda tree: from_dtensors(tree, strided="fsdp2"), case)


def check_fsdp2(convert: Callable[[Any], Any], case: Case) -> None:
    trees = {}
    for rank in case.ranks.flatten().tolist():
        shape = {"shape": case.whole.shape, "stride": case.whole.stride()}
        held = DTensor.from_local(as_fsdp2(case, rank), case.mesh(rank), case.placements, **shape)
        trees[rank] = convert({"w": held})
    assert st.core.layouts.access_problems(tree_columns(trees)) == ()
    for tree in trees.values():
        assert torch.equal(tree["w"].data, case.whole[tree["w"].global_slice()])


def test_the_law_of_fsdp2_catches_cuts_from_left_to_right() -> None:
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    uneven = Case(numbered((7,)), torch.arange(6).view(3, 2), ("dp", "tp"), placements)
    with pytest.raises(ShapeError, match="the local tensor does not match its placements"):
        check_fsdp2(from_written, uneven)


def test_sizes_that_can_be_meant_in_two_ways_are_refused_on_every_rank() -> None:
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    for size, unclear in ((6, False), (7, True), (8, False), (12, False), (13, True)):
        case = Case(numbered((size,)), torch.arange(6).view(3, 2), ("dp", "tp"), placements)
        for dtensor in case.dtensors().values():
            if unclear:
                with pytest.raises(ShapeError, match="is ambiguous"):
                    from_dtensors({"w": dtensor})
                with pytest.raises(ShapeError, match="is ambiguous"):
                    dtensor_layout({"w": dtensor})
            else:
                assert isinstance(from_dtensors({"w": dtensor})["w"], st.ShardedTensor)


# What is refused, and what stays


def test_partial_says_what_to_do() -> None:
    tree = {"grad": DTensor.from_local(numbered((4,)), within_square(0), [Replicate(), Partial()])}
    with pytest.raises(UnsupportedValue, match=r"Partial(.|\n)*\.redistribute\(\)") as caught:
        from_dtensors(tree)
    assert caught.value.__notes__ == ["of 'grad' at tree['grad']"]


def test_a_local_tensor_of_another_shape_is_refused() -> None:
    # Without shape=, torch takes each rank's part for one of several equal ones.
    guessed = DTensor.from_local(numbered((2,)), slice_of_square(3, 1), [Shard(0)], shape=(5,), stride=(1,))
    short = DTensor.from_local(numbered((2,)), slice_of_square(2, 1), [Shard(0)], shape=(5,), stride=(1,))
    with pytest.raises(
        ShapeError, match=r"the local tensor does not match its placements(.|\n)*\(3,\), this rank's part of \(5,\)"
    ):
        from_dtensors({"w": short})
    assert from_dtensors({"w": guessed})["w"].global_offset == (3,)


WRONG: Mapping[str, tuple[type[CheckpointingException], str, Callable[[Any], Any]]] = {
    "nothing there": (TreeError, "missing values for DTensors", lambda tree: {"other": 1}),
    "no data": (UnsupportedValue, "NoneType", lambda tree: st.without_data(from_dtensors(tree))),
    "a DTensor": (UnsupportedValue, "found DTensor, expected this rank's own tensor", lambda tree: tree),
    "another shape": (ShapeError, r"found \(3, 2\), expected \(2, 2\)", lambda tree: {"w": numbered((3, 2))}),
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_no_part_of_the_dtensor_is_refused(fault: str) -> None:
    kind, message, spoil = WRONG[fault]
    like = {"w": on_square(numbered((4, 2)), Shard(0), Replicate())}
    with pytest.raises(kind, match=message):
        to_dtensors(spoil(like), like=like)


def test_dtensors_are_not_taken_for_plain_values_where_shards_are_meant() -> None:
    tree = {"w": on_square(numbered((4,)), Shard(0), Replicate())}
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", numbered((4,)))}, folder := st.storage.MemoryStorage())
    asks: list[Callable[[Any], Any]] = [
        tree_columns,
        st.coverage,
        st.unshard,
        lambda trees: st.plan_reshard(trees, trees),
        lambda trees: st.reshard(trees, trees),
        lambda trees: st.redistribute(trees[0], None),
        lambda trees: st.redistribute(None, trees[0]),
        lambda trees: st.shard(trees[0], st.Mesh(dp=2), st.PartitionSpec("dp")),
        lambda trees: st.from_local(trees[0], st.Mesh(dp=2), st.PartitionSpec("dp"), 0),
        lambda trees: st.save(trees[0], st.storage.MemoryStorage()),
        lambda trees: st.load(trees[0], folder),
    ]
    for ask in asks:
        with pytest.raises(
            TreeError, match=r"leaves must be shards or plain values\n  tree\['w'\]: DTensor\n  Use `from_dtensors`"
        ):
            ask([tree])


def test_paths_that_are_one_key_are_refused() -> None:
    left, right = (on_square(numbered((4,)) + number, Shard(0), Replicate()) for number in range(2))
    tree = {"a": {"b": left}, "a.b": right}
    for convert in (from_dtensors, dtensor_layout):
        with pytest.raises(TreeError, match=r"the key 'a\.b'\n  tree\['a'\]\['b'\]\n  tree\['a\.b'\]"):
            convert(tree)
    assert from_dtensors(tree, key=lambda path: "w")["a.b"].key == "w"
    other = {"a": left, "b": on_square(numbered((4,), torch.int64), Shard(0), Replicate())}
    with pytest.raises(IntegrityError, match=r"'w': \(4,\) float32, \(4,\) int64"):
        dtensor_layout(other, key=lambda path: "w")


def test_a_dtype_without_gradients_comes_back_without_one() -> None:
    like = {"w": on_square(numbered((4,)), Shard(0), Replicate()).requires_grad_()}
    found = to_dtensors({"w": numbered((2,), torch.int64)}, like=like)["w"]
    assert found.dtype == torch.int64 and not found.requires_grad


def test_what_is_no_dtensor_has_no_spec() -> None:
    with pytest.raises(UnsupportedValue, match="not a DTensor\n  found Tensor"):
        spec_of(numbered((4,)))


def test_plain_tensors_stay_unless_they_are_named() -> None:
    tree = {"w": on_square(numbered((4,)), Shard(0), Replicate(), rank=1), "norm": numbered((3,)), "step": numbered(())}
    assert from_dtensors(tree)["norm"] is tree["norm"]
    options: Any = {"within": within_square(1), "replicated": lambda key, tensor: tensor.ndim > 0}
    shards = from_dtensors(tree, **options)
    assert (shards["norm"].key, shards["norm"].replica_id, shards["step"]) == ("norm", 1, tree["step"])
    assert dtensor_layout(tree, **options).keys == ("norm", "w")
    again = to_dtensors({**shards, "norm": shards["norm"].data}, like=tree)
    assert torch.equal(again["norm"], tree["norm"]) and not isinstance(again["norm"], DTensor)


def test_data_is_shared_and_has_no_graph() -> None:
    parameter = torch.nn.Parameter(on_square(numbered((4,)), Shard(0), Replicate()))
    shard = from_dtensors({"w": parameter}, key=lambda path: f"model/{path[-1]}")["w"]
    assert shard.key == "model/w" and type(shard.data) is torch.Tensor and not shard.data.requires_grad
    assert shard.data.data_ptr() == parameter.to_local().data_ptr()
    again = to_dtensors({"w": shard}, like={"w": parameter})["w"]
    assert again.requires_grad and again.is_leaf
    assert again.to_local().data_ptr() == shard.data.data_ptr()


def test_what_is_on_its_way_is_waited_for() -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    late = AsyncCollectiveTensor(numbered((2,)))
    tree = {"w": DTensor.from_local(late, within_square(0), [Shard(0), Replicate()])}
    data = from_dtensors(tree)["w"].data
    assert type(data) is torch.Tensor and data.tolist() == [0.0, 1.0]


def test_what_is_offloaded_stays_where_it_is() -> None:
    elsewhere = DeviceMesh("meta", SQUARE, mesh_dim_names=("dp", "tp"), _init_backend=False, _rank=0)
    whole = numbered((4, 2))
    spec = DTensorSpec(elsewhere, (Shard(0), Replicate()), TensorMeta(whole.shape, whole.stride(), whole.dtype))
    offloaded = DTensor(whole[:2].clone(), spec, requires_grad=False)
    again = to_dtensors(from_dtensors({"w": offloaded}), like={"w": offloaded})["w"]
    assert again.to_local().is_cpu and torch.equal(again.to_local(), whole[:2])
    assert again.placements == offloaded.placements


def test_cuts_in_another_order_are_refused() -> None:
    whole = numbered((4, 2))
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
    odd = DTensorSpec(within_square(0), (Shard(0), Shard(0)), meta, shard_order=order)
    with pytest.raises(UnsupportedValue, match=r"in another order(.|\n)*axis 0: .* axes \[1, 0\], expected \[0, 1\]"):
        spec_of(DTensor(whole[:1], odd, requires_grad=False))


def test_a_target_needs_no_memory() -> None:
    folder = MemoryStorage()
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", numbered((4, 2)))}, folder)
    like = {"w": on_square(numbered((4, 2)).to("meta"), Replicate(), Shard(1))}
    loaded = st.load(from_dtensors(like), folder, validate_access_integrity=False)
    found = to_dtensors(loaded, like=like)["w"]
    assert torch.equal(found.to_local(), numbered((4, 2))[:, :1])

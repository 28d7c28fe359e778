"""Lenses, case by case: dtypes, lazy and meta tensors, parameters, empty tensors, and what wrong input gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import shardtree as st
from shardtree.core.lazy import LazyTensor, stored
from shardtree.errors import MetadataError, ShapeError
from shardtree.lenses import (
    PADDING,
    AxisRuns,
    Lens,
    as_factory,
    attention_qkv,
    by_pattern,
    compose,
    expert_keys,
    expert_stack,
    factories_by_pattern,
    from_function,
    gate_and_up,
    joined_parts,
    mapped_axis,
    padded_axis,
    rearranged,
    renamed,
    rotary_halves,
    stacked_layers,
    transposed,
    unstacked_layers,
)
from shardtree.testing import (
    LENS_CASES,
    STORABLE_DTYPES,
    check_lens,
    check_pure,
    cut,
    even_layout,
    first_difference,
    random_bits,
)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
cases = pytest.mark.parametrize("name", LENS_CASES)
GATED = gate_and_up(tensor_parallel=2)


def held(shape: tuple[int, ...], key: str = "w", *, prepended: int = 0) -> st.ShardedTensor:
    data = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    return st.ShardedTensor.from_rank_offsets(key, data, prepend_axis_num=prepended)


def of_case(name: str) -> st.ShardedTensor:
    case = LENS_CASES[name]
    return held(case.shape[case.prepended :], case.keys[0], prepended=case.prepended)


def check_back(lens: Lens, shard: st.ShardedTensor) -> None:
    built = lens(shard)
    assert first_difference(built.merge([part.data for part in built.shards]), shard.data) is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", STORABLE_DTYPES, ids=str)
def test_every_dtype_goes_through_every_kind_of_lens(dtype: torch.dtype) -> None:
    lens = compose(padded_axis(6, axis=1), GATED, rearranged("(a b) c -> (b c) a", a=2), transposed())
    whole = random_bits((8, 6), dtype, 1)
    check_lens(lens, [shard for rank in (0, 1) for shard in cut(even_layout((8, 6), 2, 1), "w", whole, rank)])


@cases
def test_lenses_are_pure_and_take_parameters(name: str) -> None:
    case, shard = LENS_CASES[name], of_case(name)
    parameter = torch.nn.Parameter(shard.data.clone())
    factory = check_pure(as_factory, replace(shard, data=parameter), case.lens)
    built = check_pure(st.apply_factories, {"w": factory})
    assert not any(leaf.data.requires_grad for leaf in built["w"].values() if isinstance(leaf, st.ShardedTensor))
    assert factory.data is parameter
    assert (parameter.grad, parameter.requires_grad, parameter._version) == (None, True, 0)


@cases
def test_strided_tensors_are_stored_as_dense_ones(name: str) -> None:
    case, shard = LENS_CASES[name], of_case(name)
    wide = torch.empty(tuple(2 * size for size in shard.data.shape))
    view = wide[tuple(slice(None, None, 2) for _ in shard.data.shape)].copy_(shard.data)
    for left, right in zip(case.lens(shard).shards, case.lens(replace(shard, data=view)).shards, strict=True):
        assert first_difference(left.data, right.data) is None


@cases
def test_lazy_tensors_are_read_last(name: str) -> None:
    case, shard = LENS_CASES[name], of_case(name)
    reads = []

    def read_box(offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        reads.append(offset)
        return shard.data[tuple(slice(low, low + size) for low, size in zip(offset, shape, strict=True))].clone()

    lazy = replace(shard, data=stored(read_box, tuple(shard.data.shape), shard.dtype, name=shard.key))
    built, expected = case.lens(lazy), case.lens(shard)
    merged = built.merge([part.data for part in built.shards])
    assert not reads
    assert isinstance(merged, LazyTensor)
    for left, right in zip(built.shards, expected.shards, strict=True):
        assert first_difference(left.data.read(), right.data.contiguous()) is None
    assert first_difference(merged.read(), expected.merge([part.data for part in expected.shards])) is None


@pytest.mark.parametrize("name", [name for name, case in LENS_CASES.items() if case.shape])
def test_without_elements_there_is_nothing_but_shapes(name: str) -> None:
    """The axis that a lens is about keeps its length; another one is 0 long."""
    case = LENS_CASES[name]
    for axis in range(case.prepended, len(case.shape)):
        shape = (*case.shape[:axis], 0, *case.shape[axis + 1 :])
        shard = held(shape[case.prepended :], case.keys[0], prepended=case.prepended)
        try:
            built = as_factory(shard, case.lens).build()
        except ShapeError as error:  # of heads or a vocabulary there is a number
            assert "0" in str(error)
            continue
        parts = [leaf for leaf in built.values() if isinstance(leaf, st.ShardedTensor)]
        assert parts or name == "unstacked_layers"  # of no layers
        assert all(part.data.numel() == 0 for part in parts)
        found = st.apply_factory_merges(
            st.map_shards(lambda leaf: leaf.data if isinstance(leaf, st.ShardedTensor) else leaf, {"w": built}),
            {"w": as_factory(shard, case.lens)},
        )
        assert found["w"].shape == shard.data.shape


FOLDED = [GATED, rearranged("(a b) c -> a b c", a=2), rearranged("(a b) c -> (b a) c", a=2), expert_stack(experts=2)]


@pytest.mark.parametrize(
    ("lens", "shape", "offset", "whole"),
    [*[(lens, (0, 3), (8, 0), (8, 3)) for lens in FOLDED], (rearranged("a b -> (a b)"), (2, 0), (0, 3), (2, 3))],
)
def test_a_rank_without_elements_stores_nothing(lens: Lens, shape: Any, offset: Any, whole: Any) -> None:
    none = st.ShardedTensor("w", torch.zeros(shape), torch.float32, shape, whole, offset, None)
    assert lens(none).shards == ()
    assert lens(none).merge([]).shape == shape


def test_rows_of_one_box_are_views() -> None:
    data = torch.zeros(8, 3)
    shard = st.ShardedTensor.from_rank_offsets("w", data, (0, 1, 2))
    for lens in (
        GATED,
        transposed(),
        expert_keys("w", experts=4),
        unstacked_layers("w"),
        rearranged("(a b) c -> c a b", a=4),
    ):
        for part in lens(shard).shards:
            assert part.data.untyped_storage().data_ptr() == data.untyped_storage().data_ptr()


CUT: dict[str, tuple[Lens, tuple[int, ...], tuple[int, ...], tuple[int, ...], int]] = {
    "rows of experts": (expert_stack(experts=4), (16, 3), (3, 0), (8, 3), 3),
    "columns of experts": (expert_stack(experts=3, axis=1), (2, 6), (0, 1), (2, 5), 2),
    "merged the other way": (rearranged("(a b) c -> (b a) c", a=3), (12, 4), (0, 0), (6, 4), 6),
    "two axes merged": (rearranged("(a b) (c d) -> (d a) (b c)", a=3, c=2), (12, 10), (3, 0), (3, 10), 10),
    "a part of each": (rearranged("(a b) (c d) -> (d a) (b c)", a=3, c=2), (12, 10), (1, 4), (5, 4), 20),
}
"""A lens, a shape, a box that cuts through what it takes apart, and how many boxes are enough."""


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("name", CUT)
def test_a_box_that_cuts_through_parentheses_is_a_few_views(name: str, strided: bool) -> None:
    lens, shape, offset, local, most = CUT[name]
    places = tuple(slice(low, low + size) for low, size in zip(offset, local, strict=True))
    whole = held(shape).data
    data = whole[places] if strided else whole[places].clone()
    shard = st.ShardedTensor("w", data, data.dtype, local, shape, offset, None)
    built = lens(shard)
    assert len(built.shards) <= most
    assert {part.data.untyped_storage().data_ptr() for part in built.shards} == {data.untyped_storage().data_ptr()}
    assert first_difference(built.merge([part.data.clone() for part in built.shards]), data.contiguous()) is None
    [stored] = lens(held(shape)).shards
    for part in built.shards:
        assert first_difference(part.data.contiguous(), stored.data[part.global_slice()].contiguous()) is None


@pytest.mark.parametrize("lens", [expert_stack(experts=4), rearranged("(a b) c -> c a b", a=4), transposed()])
def test_what_was_loaded_as_one_box_is_merged_without_a_copy(lens: Lens) -> None:
    shard = held((8, 3))
    built = lens(shard)
    loaded = built.shards[0].data.clone(memory_format=torch.contiguous_format)
    merged = built.merge([loaded])
    assert first_difference(merged.contiguous(), shard.data) is None
    assert merged.untyped_storage().data_ptr() == loaded.untyped_storage().data_ptr()


@pytest.mark.parametrize("function", [torch.neg, torch.Tensor.double, lambda w: -w.T.reshape(-1)])
def test_a_box_of_one_element_goes_through_the_function_too(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    shard = st.ShardedTensor.from_rank_offsets("w", torch.full((1, 1), 3.0), (0, 1, 4))
    built = from_function(function)(shard)
    assert first_difference(built.shards[0].data.reshape(-1), function(shard.data).reshape(-1)) is None
    assert first_difference(built.merge([each.data for each in built.shards]), shard.data) is None


def test_replicas_and_prepended_axes_stay() -> None:
    shard = replace(held((8, 3), prepended=2), replica_id=(0, 4))
    for part in compose(GATED, transposed(), rearranged("d (a f) -> a d f", a=2))(shard).shards:
        assert part.replica_id == (0, 4)
        assert (part.prepend_axis_num, part.global_shape[:2]) == (2, (1, 1))


def test_padding_is_filled_and_need_not_be_stored() -> None:
    table = st.ShardedTensor.from_rank_offsets("w", torch.ones(4), (0, 2, 3))  # rows 8 to 11 of 12, all padding
    lens = padded_axis(7, fill=5)
    assert lens(table).shards == ()
    assert torch.equal(lens(table).merge([]), torch.full((4,), 5.0))
    built = as_factory(table, lens).build()
    assert list(built) == ["merge"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool], ids=str)
def test_padding_has_the_dtype_of_what_was_loaded(dtype: torch.dtype) -> None:
    merged = padded_axis(2, fill=1)(held((3,))).merge([torch.zeros(2, dtype=torch.int8).to(dtype)])
    assert merged.dtype == dtype
    assert merged.float().tolist() == [0, 0, 1]


def test_what_nothing_is_loaded_of_is_in_memory_where_the_target_is_not() -> None:
    """A meta tensor is a load's target; the rank that holds padding alone loads nothing."""
    table = st.ShardedTensor.from_rank_offsets("w", torch.ones(4, device="meta"), (0, 2, 3))
    assert padded_axis(7, fill=5)(table).merge([]).tolist() == [5.0] * 4
    none = st.ShardedTensor("w", torch.zeros(0, 3, device="meta"), torch.float32, (0, 3), (8, 3), (8, 0), None)
    for lens in (GATED, rearranged("(a b) c -> a b c", a=2), unstacked_layers("w")):
        assert lens(none).merge([]).device.type == "cpu"


@pytest.mark.parametrize(
    "loaded",
    [torch.ones(1, 2, device="meta"), stored(lambda _, box: torch.ones(box), (1, 2), torch.float32, name="w")],
    ids=["meta", "lazy"],
)
def test_boxes_that_are_all_padding_come_where_the_others_were_loaded_to(loaded: Any) -> None:
    flat = st.ShardedTensor.from_rank_offsets_flat("w", torch.zeros(12), (4, 4), flattened_range=slice(2, 14))
    factory = as_factory(flat, padded_axis(1, fill=5))  # stores 2 of the 12
    merged = factory.merge_fn({**factory.build(), "0": loaded})
    assert type(merged) is type(loaded) and tuple(merged.shape) == (12,)
    assert merged.is_meta if isinstance(merged, torch.Tensor) else merged.read().tolist() == [1.0] * 2 + [5.0] * 10


def test_a_padded_axis_may_also_be_stored_with_another_padding() -> None:
    shard = replace(held((8, 2)), allow_shape_mismatch=True)
    assert [part.allow_shape_mismatch for part in padded_axis(5)(shard).shards] == [True]


def test_layers_numbered_by_stage_get_the_model_s_numbers() -> None:
    [part] = stacked_layers("layers", 6, first=4)(held((2,), "layers.1.norm")).shards
    assert (part.key, part.global_offset) == ("layers.norm", (5, 0))


@pytest.mark.parametrize("first", [2, 4], ids=["partly", "all"])
def test_layers_beyond_the_global_shape_are_refused_unless_they_are_padding(first: int) -> None:
    shard = st.ShardedTensor.from_rank_offsets("layers.w", torch.ones(2, 2), (0, first // 2, 3))
    with pytest.raises(ShapeError, match=rf"layers beyond its global shape\n  found layers {first} to {first + 1}"):
        unstacked_layers("layers")(replace(shard, global_shape=(3, 2), allow_shape_mismatch=True))
    padded = compose(padded_axis(3), unstacked_layers("layers"))(shard)
    stored = [torch.ones(2)] * len(padded.shards)
    assert padded.merge(stored).tolist() == [[float(number < 3)] * 2 for number in range(first, first + 2)]


def test_layers_keep_the_grid_of_their_tensors() -> None:
    shard = st.ShardedTensor.from_rank_offsets("layers.1.w", torch.zeros(2, 3), (0, 1, 4))
    [part] = stacked_layers("layers", 6)(shard).shards
    assert part.axis_fragmentations == (6, 4, 1)
    [back] = unstacked_layers("layers")(part).shards
    assert (back.key, back.axis_fragmentations) == ("layers.1.w", (4, 1))
    [turned] = compose(transposed(), stacked_layers("layers", 6))(shard).shards
    assert turned.axis_fragmentations == (6, 1, 4)


def test_a_state_is_stored_beside_its_parameter() -> None:
    lens = compose(attention_qkv(heads=4, head_size=1, part="qkv", names=("q", "k", "v")), stacked_layers("layers", 4))
    factory = as_factory(held((12, 2), "layers.3.qkv.weight"), lens)
    state = replace(
        factory, key=f"optimizer.state.exp_avg.{factory.key}", data=torch.zeros(5), flattened_range=slice(3, 8)
    )
    keys = {leaf.key for leaf in state.build().values() if isinstance(leaf, st.ShardedTensor)}
    assert keys <= {f"optimizer.state.exp_avg.layers.{name}.weight" for name in "qkv"}


def test_factories_by_pattern_takes_the_first_pattern_and_leaves_the_rest() -> None:
    tree = {"a": held((4,), "h.0.w"), "b": held((4,), "h.0.b"), "step": 3}
    found = factories_by_pattern(tree, {"**.w": renamed("w", "first"), "h.**": renamed("h", "g")})
    keys = {name: found[name].build()["0"].key for name in "ab"}
    assert keys == {"a": "h.0.first", "b": "g.0.b"}
    assert found["step"] == 3
    assert factories_by_pattern(tree, {"x.**": transposed()}, absent=["x.**"]) == tree


def test_states_get_their_parameter_s_lens_and_what_ends_alike_does_not() -> None:
    """Also those of Megatron-Core's `ChainedOptimizer`, which puts its optimizers' numbers in front."""
    step = "optimizer.state.step.layers.0.fc1.weight"
    parameter = "layers.0.fc1.weight"
    states = [f"optimizer.state.exp_avg.{parameter}", f"chained_1.optimizer.state.exp_avg.{parameter}"]
    others = [step, "layers.0.fc2.weight", "layers.0.fc1.weight.x", f"state.exp_avg.{parameter}", f"x.{parameter}"]
    tree = [held((4,), key) for key in (parameter, *states, *others)]
    found = factories_by_pattern(tree, {"optimizer.state.step.**": None, "layers.*.fc1.weight": GATED})
    assert [isinstance(each, st.ShardedTensorFactory) for each in found] == [True] * 3 + [False] * 5
    assert found[3] is tree[3]


def test_a_state_goes_the_way_of_its_parameter_whatever_stands_before_its_key() -> None:
    lens = by_pattern({"layers.*.q": rotary_halves(head_size=4), "**": None})
    for key in ("layers.0.q", "optimizer.state.exp_avg.layers.0.q", "ema.layers.0.q"):
        assert lens(held((4,), key)).shards[0].data.tolist() == [0, 2, 1, 3]
    assert lens(held((4,), "layers.0.qq")).shards[0].data.tolist() == [0, 1, 2, 3]


def runs(length: Any, part: Any, start: Any, sizes: Any) -> AxisRuns:
    return AxisRuns(np.array(length), np.array(part), np.array(start), sizes)


@pytest.mark.parametrize("flat", [slice(8, 9), slice(6, 12), slice(100, 100)])
@pytest.mark.parametrize("shape", [(8, 2), (4, 2)], ids=["of a larger tensor", "of its own"])
def test_a_flat_range_that_leaves_its_box_is_refused(shape: tuple[int, ...], flat: slice) -> None:
    """Within the larger tensor its elements would be stored in another rank's rows."""
    box = st.ShardedTensor("w", torch.zeros(4, 2), torch.float32, (4, 2), shape, (0, 0), None)
    for data in (torch.zeros(flat.stop - flat.start), None):
        with pytest.raises(
            MetadataError, match=r"'w': invalid value of flattened_range\n.* 8 elements of local_shape \(4, 2\)"
        ):
            replace(as_factory(box, transposed()), data=data, flattened_range=flat).build()


@pytest.mark.parametrize("shape", [(), (0, 2)], ids=str)
def test_a_flat_range_that_leaves_a_scalar_or_an_empty_tensor_is_refused(shape: tuple[int, ...]) -> None:
    factory = as_factory(held(shape), renamed("w", "v"))
    with pytest.raises(MetadataError, match="flattened_range"):
        replace(factory, data=torch.zeros(2), flattened_range=slice(0, 2)).build()


def test_runs_of_no_indices_may_stand_anywhere() -> None:
    empty = runs([2, 0, 1, 0], [0, 0, 0, 0], [1, 2, 0, 9], (3,))
    check_back(mapped_axis(0, lambda n: empty), held((3,)))


def test_padding_is_no_part() -> None:
    padded = runs([2, 1], [0, PADDING], [0, 0], (2,))
    assert (padded.total, padded.sizes) == (3, (2,))
    check_back(mapped_axis(0, lambda n: joined_parts(padded)), replace(held((3,)), data=torch.tensor([1.0, 2.0, 0.0])))


def test_an_error_names_the_tensor_its_shape_and_its_path() -> None:
    tree = {"mlp": {"fc1": as_factory(held((10, 2), "mlp.fc1.weight"), gate_and_up(tensor_parallel=4))}}
    with pytest.raises(ShapeError) as caught:
        st.apply_factories(tree)
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    for words in ("'mlp.fc1.weight'", "(10, 2)", "tree['mlp']['fc1']", "gate_and_up"):
        assert words in text

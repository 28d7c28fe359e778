"""Saving and loading: what test_serialization says of layouts, metadata, errors, shapes, objects and common states."""

from __future__ import annotations

import io
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import CheckpointingException, KeyMismatch, NotACheckpoint, ShapeError, StrategyError
from tests.megatron_cases.worlds import (
    FORMATS,
    RANKS,
    assert_same,
    data_of,
    in_every_format,
    loaded,
    on_ranks,
    places,
    saved,
    whole,
)


def test_the_default_format_is_safetensors_where_theirs_is_torch_dist() -> None:
    folder = saved([{"w": whole("w", torch.ones(2))}])
    assert any(name.endswith(".safetensors") for name in folder.all_names())


@in_every_format
def test_only_what_is_asked_for_comes_back_under_the_targets_names(backend: Any) -> None:
    def tree(rank: int) -> Any:
        tensors = {"keyA": torch.ones(2, 4), "keyB": torch.ones(3, 5, 7)}
        return {f"sd_{key}": whole(key, tensor, replica_id=rank) for key, tensor in tensors.items()}

    folder = saved(on_ranks(tree), backend)
    target = {"load_sd_keyA": whole("keyA", torch.zeros(2, 4))}
    for result in loaded([target], folder):
        assert_same(result, {"load_sd_keyA": torch.ones(2, 4)})


# Common states.


def ranked(rank: int) -> dict[str, Any]:
    return {"w": whole("w", torch.ones(2, 4), (0, rank, RANKS)), "lr": 0.01, "rank": rank}


def without_rank(common: dict[str, Any]) -> dict[str, Any]:
    del common["rank"]
    return common


@in_every_format
def test_what_preprocessing_deletes_may_differ_and_rank_zeros_is_stored(backend: Any) -> None:
    folder = st.storage.MemoryStorage()
    st.simulate(
        RANKS,
        lambda world: st.save(ranked(world.rank), folder, backend, None, True, False, without_rank, world=world),
    )
    assert st.load_common_state_dict(folder) == {"lr": 0.01, "rank": 0}


@in_every_format
def test_common_states_that_differ_are_an_error_naming_path_and_ranks_where_theirs_is_a_log(backend: Any) -> None:
    with pytest.raises(CheckpointingException, match=r"tree\['rank'\][\s\S]*rank"):
        saved(on_ranks(ranked), backend)


@pytest.mark.parametrize("backend", [FORMATS["safetensors"], FORMATS["torch_dist"]], ids=str)
def test_ranks_with_other_common_states_load_rank_zeros_where_they_are_not_compared(backend: Any) -> None:
    def tree(rank: int) -> dict[str, Any]:
        plain = [{"common": "common-value"}, {"a": 3}, {"b": 3}]
        return plain[rank] if rank < 3 else {"a": whole("x", torch.full((2,), rank), replica_id=rank - 3)}

    with pytest.raises(CheckpointingException):
        saved(on_ranks(tree), backend)
    folder = saved(on_ranks(tree), backend, validate_access_integrity=False)
    for rank, result in enumerate(loaded(on_ranks(tree), folder)):
        expected = {"common": "common-value"} | ({"a": torch.tensor([3, 3])} if rank > 2 else {})
        assert_same(result, expected)


CONTENTS = [{"a": 3}, {"nested": {"a": 3}, "flat": (5, {6: None})}, {}]


@in_every_format
@pytest.mark.parametrize("content", CONTENTS, ids=str)
def test_content_metadata_comes_from_the_checkpoint_and_from_a_loaded_state(backend: Any, content: Any) -> None:
    folder = saved([{"common": (3, 5, 7)}], backend, content_metadata=content)
    assert st.load_content_metadata(folder) == content
    (result,) = loaded([{"common": (3, 5, 7)}], folder)
    assert st.load_content_metadata(preloaded_state_dict=result) == content


# Layouts.

A = torch.tensor([[0.0, 1, 2, 3], [10, 11, 12, 13]])
B = (torch.arange(80.0) + 100 * torch.arange(4.0).reshape(4, 1, 1)).expand(4, 5, 80)


def cut(rank: int) -> dict[str, Any]:
    place = places(2, 4)[rank]
    part = A[place.tp : place.tp + 1, place.pp : place.pp + 1]
    return {
        "a": whole("keyA", part, (0, place.tp, 2), (1, place.pp, 4)),
        "b": whole("keyB", B[:, :, 10 * rank : 10 * rank + 10].clone(), (2, rank, RANKS)),
    }


@in_every_format
def test_what_two_axes_cut_loads_whole_on_every_rank(backend: Any) -> None:
    def target(rank: int) -> dict[str, Any]:
        return {
            "a": whole("keyA", torch.empty(2, 4), replica_id=rank),
            "b": whole("keyB", torch.empty(4, 5, 80), replica_id=rank),
        }

    for result in loaded(on_ranks(target), saved(on_ranks(cut), backend)):
        assert_same(result, {"a": A, "b": B})


@in_every_format
def test_it_loads_in_columns_and_in_rows_of_a_prepended_axis(backend: Any) -> None:
    def target(rank: int) -> dict[str, Any]:
        place = places(1, 2)[rank]
        return {
            "a": whole("keyA", torch.empty(2, 1), (1, place.dp, 4), replica_id=place.pp),
            "b": whole("keyB", torch.empty(5, 80), (0, rank // 2, 4), prepend_axis_num=1, replica_id=rank % 2),
        }

    for rank, result in enumerate(loaded(on_ranks(target), saved(on_ranks(cut), backend))):
        column = places(1, 2)[rank].dp
        assert_same(result, {"a": A[:, column : column + 1], "b": B[rank // 2]})


UNEVEN = [
    ([3] * 8, [3] * 8),
    ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8]),
    ([1, 5, 7, 3, 6, 2, 5, 4], [1, 5, 7, 3, 6, 2, 5, 4]),
    ([2] * 7 + [1], [2] * 7 + [1]),
    ([2] * 7 + [10], [2] * 7 + [10]),
    ([3] * 8, [1] * 6 + [2, 16]),
    ([1, 5, 7, 3, 6, 2, 5, 4], [14, 3, 6, 3, 1, 1, 2, 3]),
    ([5] * 6 + [0, 0], [5, 0, 5, 0, 5, 5, 3, 7]),
    ([15] + [0] * 7, [0, 0, 0] + [3] * 5),
]
SEVERAL = [
    ([[3]] * 8, [[3]] * 8),
    ([[]] * 7 + [[3, 3]], [[]] * 7 + [[3, 3]]),
    ([[4], [7, 8], [1], [1], [1], [1], [1], [3, 3]], [[2, 4], [], [5], [], [5, 9], [], [1] * 5, []]),
    ([[2]] * 5 + [[10]] * 3, [[10]] * 3 + [[2]] * 5),
    ([[3]] * 8, [[2, 4]] * 4 + [[]] * 4),
]


def pieces(sizes: list[list[int]], values: torch.Tensor) -> list[dict[int, Any]]:
    """Return each rank's shards by number: consecutive pieces of one tensor, without a regular grid."""
    ends = pairwise(accumulate((size for own in sizes for size in own), initial=0))
    return [
        {
            number: st.ShardedTensor(
                "a", values[start:stop].clone(), values.dtype, (stop - start,), values.shape, (start,), None
            )
            for number, (_, (start, stop)) in enumerate(zip(own, ends, strict=False))
        }
        for own in sizes
    ]


def check_pieces(source: list[list[int]], target: list[list[int]], backend: Any) -> None:
    values = torch.repeat_interleave(torch.arange(RANKS), torch.tensor([sum(own) for own in target]))
    folder = saved(pieces(source, values), backend)
    for rank, result in enumerate(loaded(pieces(target, torch.full_like(values, -1)), folder)):
        assert_same(result, {number: torch.full((size,), rank) for number, size in enumerate(target[rank])})


@pytest.mark.slow
@in_every_format
@pytest.mark.parametrize(("source", "target"), UNEVEN, ids=str)
def test_uneven_and_empty_pieces_load_in_other_ones(backend: Any, source: list[int], target: list[int]) -> None:
    check_pieces([[size] for size in source], [[size] for size in target], backend)


@in_every_format
@pytest.mark.parametrize(("source", "target"), SEVERAL, ids=str)
def test_so_do_several_pieces_a_rank_or_none(backend: Any, source: list[list[int]], target: list[list[int]]) -> None:
    check_pieces(source, target, backend)


# Metadata.


@in_every_format
def test_tensors_metadata_are_whole_tensors_by_key_which_load(backend: Any) -> None:
    def tree(rank: int) -> dict[str, Any]:
        return {
            "sd_a": whole("keyA", torch.arange(10) + 10 * rank, (0, rank, RANKS)),
            "sd_b": whole("keyB", torch.ones(3, 5, 7), (2, rank, RANKS)),
        }

    folder = saved(on_ranks(tree), backend)
    found = st.load_tensors_metadata(folder)
    assert found.keys() == {"keyA", "keyB"}
    for key, shape in (("keyA", (80,)), ("keyB", (3, 5, 56))):
        assert found[key].global_shape == found[key].local_shape == shape
        assert found[key].global_offset == (0,) * len(shape) and found[key].axis_fragmentations == (1,) * len(shape)
        assert st.is_main_replica(found[key].replica_id)
    (result,) = loaded([found], folder)
    assert_same(result, {"keyA": torch.arange(80), "keyB": torch.ones(3, 5, 56)})


# Factories and objects.


def tripled(base: int, rank: int) -> dict[str, Any]:
    def build(key: str, tensor: Any, replica_id: st.ReplicaId, flattened_range: slice | None) -> list[Any]:
        return [whole(f"{key}part{number}", tensor, replica_id=replica_id) for number in range(3)]

    shards = [whole(key, torch.arange(size) + base, replica_id=rank) for key, size in (("A", 2), ("B", 3), ("C", 4))]
    return {"all": [*shards, st.ShardedTensorFactory("D", torch.arange(5) + base, build, sum, replica_id=rank)]}


@in_every_format
def test_shards_and_factories_mix_in_a_list(backend: Any) -> None:
    folder = saved(on_ranks(lambda rank: tripled(0, rank), 2), backend)
    for result in loaded(on_ranks(lambda rank: tripled(10, rank), 2), folder):
        assert_same(result, {"all": [torch.arange(2), torch.arange(3), torch.arange(4), 3 * torch.arange(5)]})


@in_every_format
def test_an_object_of_bytes_loads_in_the_place_of_another(backend: Any) -> None:
    def tree(name: str, text: bytes) -> dict[str, Any]:
        return {name: st.ShardedObject("sh_obj_A", io.BytesIO(text), (1,), (0,))}

    (result,) = loaded([tree("other", b"new")], saved([tree("some", b"old")], backend))
    assert result.keys() == {"other"} and result["other"].getvalue() == b"old"


# Errors.


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_folder_that_is_not_there_or_empty_is_named_on_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    target = {"w": whole("w", torch.ones(2))}
    for folder in (tmp_path / "none", tmp_path):
        with pytest.raises(NotACheckpoint) as caught:
            loaded([target] * ranks, folder, validate_access_integrity=False)
        assert str(folder) in str(caught.value)


@in_every_format
def test_a_key_that_is_not_stored_is_named(backend: Any) -> None:
    folder = saved([{"some": whole("keyA", torch.ones(10))}], backend)
    with pytest.raises(KeyMismatch, match="different_key"):
        loaded([{"some": whole("different_key", torch.ones(10))}], folder)


def columns(size: int, *, flexible: bool, rank: int, value: float = 1.0) -> dict[str, Any]:
    place = places(2, 4)[rank]
    part = torch.full((2, size), value)
    key = "keyB" if flexible else "keyA"
    return {"w": whole(key, part, (1, place.pp, 4), replica_id=place.tp, allow_shape_mismatch=flexible)}


@pytest.fixture(scope="module", params=FORMATS.values(), ids=FORMATS)
def counted(request: pytest.FixtureRequest) -> Any:
    """Two tensors of shape (2, 32) with columns 0 to 31, one of which may have another shape."""

    def tree(rank: int) -> Any:
        part = (torch.arange(4.0) + 4 * rank).expand(2, 4).clone()
        fields = {"keyA": {}, "keyB": {"allow_shape_mismatch": True}}
        return {key: whole(key, part, (1, rank, RANKS), **fields[key]) for key in fields}

    return saved(on_ranks(tree), request.param)


@pytest.mark.parametrize("size", [7, 9])
def test_another_shape_is_an_error_naming_the_key(counted: Any, size: int) -> None:
    with pytest.raises(ShapeError, match="keyA"):
        loaded(on_ranks(lambda rank: columns(size, flexible=False, rank=rank)), counted)


def test_a_smaller_tensor_that_may_mismatch_gets_the_overlap(counted: Any) -> None:
    results = loaded(on_ranks(lambda rank: columns(7, flexible=True, rank=rank)), counted)
    for place, result in zip(places(2, 4), results, strict=True):
        assert_same(result, {"w": (torch.arange(7.0) + 7 * place.pp).expand(2, 7)})


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_beyond_what_is_stored_a_larger_one_keeps_its_own_where_theirs_pads_with_zeros(
    counted: Any, value: float
) -> None:
    results = loaded(on_ranks(lambda rank: columns(9, flexible=True, rank=rank, value=value)), counted)
    for place, result in zip(places(2, 4), results, strict=True):
        expected = (torch.arange(9.0) + 9 * place.pp).expand(2, 9).clone()
        expected[expected > 31] = value
        assert_same(result, {"w": expected})


# Removal.


def prefixed(rank: int) -> dict[str, Any]:
    return {
        "kept": whole("keyA", torch.ones(2, 4), (0, rank, RANKS)),
        "gone": whole("prefix_key", torch.ones(3, 5, 7), (2, rank, RANKS)),
    }


@pytest.mark.parametrize("backend", [FORMATS["safetensors"], FORMATS["zarr"]], ids=str)
def test_tensors_are_removed_by_the_prefix_of_their_keys(backend: Any) -> None:
    folder = saved(on_ranks(prefixed), backend)
    st.remove_sharded_tensors(folder, "prefix")
    assert st.load_tensors_metadata(folder).keys() == {"keyA"}
    kept = on_ranks(lambda rank: {"kept": prefixed(rank)["kept"]})
    for result in loaded(kept, folder):
        assert_same(result, data_of(kept[0]))
    with pytest.raises(KeyMismatch, match="prefix_key"):
        loaded(on_ranks(prefixed), folder)


def test_torch_dist_removes_nothing_and_names_the_formats_that_do_where_theirs_rewrites_its_index() -> None:
    folder = saved(on_ranks(prefixed), FORMATS["torch_dist"])
    with pytest.raises(StrategyError, match="safetensors"):
        st.remove_sharded_tensors(folder, "prefix")
    assert st.load_tensors_metadata(folder).keys() == {"keyA", "prefix_key"}

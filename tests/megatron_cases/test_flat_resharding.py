"""Flat ranges: what test_flattened_resharding says of boxes that are cut once more by data-parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardtree as st
from tests.megatron_cases.worlds import Place, assert_same, data_of, in_every_format, loaded, places, saved, whole

GLOBAL = torch.arange(8 * 5 * 40).reshape(8, 5, 40)
LAYOUTS = [((2, 4), (2, 4)), ((2, 4), (2, 2)), ((2, 4), (4, 2)), ((8, 1), (1, 2)), ((1, 1), (2, 4)), ((1, 4), (8, 1))]


def tree(place: Place, values: torch.Tensor = GLOBAL) -> dict[str, Any]:
    """Return a box of tensor and pipeline ranks, and a data-parallel rank's range of it; ranges aren't level."""
    box = values.chunk(place.tp_size)[place.tp].chunk(place.pp_size, 2)[place.pp].contiguous()
    cuts = (0, place.tp, place.tp_size), (2, place.pp, place.pp_size)
    share, last = box.numel() // place.dp_size, place.dp == place.dp_size - 1
    own = slice(share * place.dp + place.dp, share * (place.dp + 1) + (0 if last else place.dp + 1))
    flat = box.flatten()[own]
    return {
        "box": whole("box", box, *cuts, replica_id=place.dp),
        "flat": st.ShardedTensor.from_rank_offsets_flat("flat", flat, tuple(box.shape), *cuts, flattened_range=own),
    }


@pytest.mark.slow
@in_every_format
@pytest.mark.parametrize(("source", "target"), LAYOUTS, ids=str)
def test_flat_ranges_and_boxes_load_in_any_other_layout(backend: Any, source: Any, target: Any) -> None:
    folder = saved([tree(place) for place in places(*source)], backend)
    results = loaded([tree(place, torch.zeros_like(GLOBAL)) for place in places(*target)], folder)
    for place, result in zip(places(*target), results, strict=True):
        assert_same(result, data_of(tree(place)))


@in_every_format
@pytest.mark.parametrize("source", [(2, 4), (8, 1), (1, 1), (1, 4)], ids=str)
def test_metadata_of_a_flat_tensor_are_its_boxs_and_load_as_a_box_where_theirs_is_flat(
    backend: Any, source: Any
) -> None:
    folder = saved([tree(place) for place in places(*source)], backend)
    found = st.load_tensors_metadata(folder)
    assert found["flat"].global_shape == found["box"].global_shape == found["flat"].local_shape == (8, 5, 40)
    (result,) = loaded([found], folder)
    assert_same(result, {"flat": GLOBAL, "box": GLOBAL})

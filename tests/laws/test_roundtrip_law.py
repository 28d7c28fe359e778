"""Saved in layout A, loaded in layout B, put together: what it was, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardtree
from shardtree.mapping import ShardedTensor
from shardtree.testing import (
    STORABLE_DTYPES,
    GlobalState,
    Piece,
    check_layout,
    check_roundtrip,
    even_layout,
    global_states,
    random_bits,
    state_layouts,
)
from tests.options import load_keywords, save_keywords

# What torch says, once, when it makes a tensor of half-precision complex numbers.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

EXAMPLES = settings.default.max_examples if settings.default else 100


def zeros(target: Any) -> Any:
    """Return a target whose shards have memory, which isn't contiguous where that is possible."""
    return shardtree.map_shards(_zeros, target)


def _zeros(leaf: Any) -> Any:
    if not isinstance(leaf, ShardedTensor):
        return leaf
    return leaf.init_data("cpu", lambda shape, dtype, device: random_bits(shape[::-1], dtype, 5).permute(*axes(shape)))


def axes(shape: tuple[int, ...]) -> list[int] | list[list[int]]:
    """Return the axes in reverse, as `permute` takes them."""
    return list(range(len(shape)))[::-1] or [[]]


def reloaded(target: Any, place: Any, **options: Any) -> Any:
    """Return what a load gives of what was loaded, boxed again and saved in its place."""
    again = shardtree.rebox(target, shardtree.load(target, place, **load_keywords(**options)))
    shardtree.save(again, place, overwrite=True, **save_keywords(**options))
    return shardtree.load(target, place, **load_keywords(**options))


TARGETS: dict[str, dict[str, Any]] = {
    "empty": {},
    "given": {"prepare_target": zeros},
    "donated": {"prepare_target": zeros, "load": partial(shardtree.load, donate=True)},
    "exchanged": {"load": partial(shardtree.load, options=shardtree.LoadOptions(exchange="always"))},
    "boxed again": {"load": reloaded},
    "unchecked": {
        "save": partial(shardtree.save, validate_access_integrity=False),
        "load": partial(shardtree.load, validate_access_integrity=False, options=shardtree.LoadOptions(verify="all")),
    },
}


def run(data: st.DataObject, most_ranks: int, **options: Any) -> None:
    state = data.draw(global_states(), label="state")
    save_ranks, load_ranks = (data.draw(st.integers(1, most_ranks), label=label) for label in ("save on", "load on"))
    one, other = (data.draw(state_layouts(state, ranks)) for ranks in (save_ranks, load_ranks))
    check_roundtrip(state, one, other, **options)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=EXAMPLES // 2)
@given(data=st.data())
def test_what_is_loaded_in_another_layout_is_what_was_saved(target: str, data: st.DataObject) -> None:
    run(data, 6, **TARGETS[target])


@pytest.mark.slow
@settings(max_examples=EXAMPLES // 4)
@given(data=st.data())
def test_up_to_64_ranks_save_and_load(data: st.DataObject) -> None:
    run(data, 64)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", STORABLE_DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    state = GlobalState({"w": random_bits((4, 6, 2), dtype, 1)}, {}, {"t": random_bits((3,), dtype, 2)})
    one, other = ({"w": even_layout((4, 6, 2), ranks, axis)} for ranks, axis in ((4, 0), (3, 1)))
    check_roundtrip(state, one, other)


@settings(max_examples=EXAMPLES // 4)
@given(data=st.data())
def test_files_do_what_memory_does(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    run(
        data,
        3,
        directory=tmp_path_factory.mktemp("checkpoint"),
        save=partial(shardtree.save, options=shardtree.SaveOptions(durable=False)),
    )


def negated(tree: Any, directory: Any, **options: Any) -> Any:
    """Load with one element's bits flipped."""
    loaded = shardtree.load(tree, directory, **load_keywords(**options))
    for tensors in loaded.get("model", {}).values():
        for tensor in tensors:
            if tensor.numel():
                tensor.view(torch.uint8).view(-1)[-1] ^= 1
                return loaded
    return loaded


def transposing(tree: Any, directory: Any, **options: Any) -> Any:
    """Save square boxes in the wrong order, as a confusion of axes would."""

    def turned(leaf: Any) -> Any:
        square = isinstance(leaf, ShardedTensor) and leaf.data.ndim == 2 and len(set(leaf.data.shape)) == 1
        return shardtree.map_data(lambda tensor: tensor.T.clone(), leaf) if square else leaf

    return shardtree.save(shardtree.map_shards(turned, tree), directory, **save_keywords(**options))


@pytest.mark.parametrize("fault", [{"load": negated}, {"save": transposing}], ids=["flipped bit", "swapped axes"])
def test_the_law_catches(fault: dict[str, Any]) -> None:
    state = GlobalState({"w": random_bits((4, 4), torch.float32, 1)}, {}, {})
    one, other = ({"w": even_layout((4, 4), 2, axis)} for axis in (None, 0))
    check_roundtrip(state, one, other)
    with pytest.raises(AssertionError, match=r"'w': \d+ of 16 elements differ"):
        check_roundtrip(state, one, other, **fault)


def test_the_law_catches_a_lost_object() -> None:
    state = GlobalState({"w": torch.zeros(2)}, {"rng": [1, 2]}, {})
    layout = {"w": even_layout((2,), 2, 0)}

    def first_objects_only(tree: Any, directory: Any, **options: Any) -> Any:
        loaded = shardtree.load(tree, directory, **load_keywords(**options))
        return {**loaded, "objects": [1 for _ in loaded["objects"]]}

    with pytest.raises(AssertionError, match="rng/shard_1_2"):
        check_roundtrip(state, layout, layout, load=first_objects_only)


@pytest.mark.parametrize(
    "fault", [lambda pieces: pieces[1:], lambda pieces: (*pieces, pieces[0])], ids=["a gap", "held twice"]
)
def test_the_law_catches_layouts_that_do_not_tile(fault: Callable[[tuple[Piece, ...]], tuple[Piece, ...]]) -> None:
    layout = even_layout((4, 6), 2, axis=0)
    check_layout(layout)
    with pytest.raises(shardtree.errors.IntegrityError):
        check_layout(replace(layout, pieces=fault(layout.pieces)))

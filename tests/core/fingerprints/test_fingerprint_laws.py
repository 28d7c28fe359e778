"""Fingerprints: the same in every layout, another one after any change."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardtree
from shardtree import ShardedTensor, World
from shardtree.core.fingerprints import axis_weights, box_total, device_total, host_total, shard_pieces
from shardtree.core.fingerprints._sums import FACTOR
from shardtree.storage import MemoryStorage
from shardtree.testing import (
    STORABLE_DTYPES,
    GlobalState,
    Layout,
    even_layout,
    global_states,
    layouts,
    random_bits,
    rank_tree,
    shapes,
    state_layouts,
    tensors,
)

# What torch says, once, when it makes a tensor of half-precision complex numbers.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

EXAMPLES = settings.default.max_examples if settings.default else 100
PAGE = Path(__file__).parents[3] / "docs" / "checks.md"
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Fingerprint = Callable[..., Mapping[str, int]]


def reference() -> Callable[..., int]:
    """Return the function on the page that defines fingerprints."""
    (block,) = [
        text for text in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S) if "def scram" in text
    ]
    names: dict[str, Any] = {}
    exec(block.partition("assert reference")[0], names)
    return names["reference"]  # type: ignore[no-any-return]


REFERENCE = reference()


def words(tensor: torch.Tensor) -> Any:
    """Return a tensor's bits as unsigned integers, without any code of the library."""
    size = min(8, tensor.itemsize)
    more = (2,) if tensor.itemsize == 16 else ()
    shape = (*tensor.shape, *more)
    if not tensor.numel():
        return np.zeros(shape, dtype=WORDS[size])
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return flat.numpy().view(WORDS[size]).reshape(shape)


def by_the_page(key: str, tensor: torch.Tensor) -> int:
    return REFERENCE(key, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), words(tensor))


def whole(tensor: torch.Tensor, key: str = "w") -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, tensor)


def number(tensor: torch.Tensor) -> int:
    return shardtree.fingerprint([whole(tensor)])["w"]


def check_layout(state: GlobalState, layout: Mapping[str, Layout], fingerprint: Fingerprint) -> None:
    """Raise unless every rank gets, in this layout, what the page says of the global tensors."""
    ranks = next(iter(layout.values())).ranks
    found = shardtree.simulate(ranks, lambda world: fingerprint(rank_tree(state, layout, world.rank), world=world))
    expected = {key: by_the_page(key, tensor) for key, tensor in sorted(state.tensors.items())}
    assert [dict(each) for each in found] == [expected] * ranks


@pytest.mark.slow
@settings(max_examples=EXAMPLES // 2)
@given(data=st.data())
def test_layouts_make_no_difference(data: st.DataObject) -> None:
    state = data.draw(global_states(), label="state")
    layout = data.draw(state_layouts(state, data.draw(st.integers(1, 5), label="ranks")), label="layout")
    check_layout(state, layout, shardtree.fingerprint)


def adding(tree: Any, world: World, change: Callable[[ShardedTensor], ShardedTensor | None]) -> dict[str, int]:
    """Return fingerprints by adding up shards that were changed before, without a check of the layout."""
    shards = [change(leaf) for _, leaf in shardtree.trees.leaves_with_paths(tree) if isinstance(leaf, ShardedTensor)]
    own = [(shard.key, shard.dtype, shard.global_shape, _total(shard)) for shard in shards if shard is not None]
    sums: dict[str, int] = {}
    for key, dtype, shape, total in (row for rows in world.all_gather(own) for row in rows):
        empty = REFERENCE(key, str(dtype).removeprefix("torch."), shape, np.zeros((0,), dtype=np.uint8))
        sums[key] = (sums.get(key, empty) + total) % 2**64
    return dict(sorted(sums.items()))


def _total(shard: ShardedTensor) -> int:
    return sum(map(shardtree.core.fingerprints.piece_total, shard_pieces(shard)))


def _main(shard: ShardedTensor) -> ShardedTensor | None:
    return shard if shardtree.is_main_replica(shard.replica_id) else None


def _at_zero(shard: ShardedTensor) -> ShardedTensor | None:
    return None if _main(shard) is None else replace(shard, global_offset=(0,) * len(shard.global_shape))


STATE = GlobalState({"w": random_bits((6, 4), torch.float32, 3)}, {}, {})
ROWS, COPIES = {"w": even_layout((6, 4), 2, axis=0)}, {"w": even_layout((6, 4), 2)}


@pytest.mark.parametrize(
    ("change", "layout"),
    [(lambda shard: shard, COPIES), (_at_zero, ROWS)],
    ids=["replicas counted twice", "local instead of global indices"],
)
def test_the_law_of_layouts_catches(change: Any, layout: Mapping[str, Layout]) -> None:
    check_layout(STATE, layout, partial(adding, change=_main))
    with pytest.raises(AssertionError):
        check_layout(STATE, layout, partial(adding, change=change))


@pytest.mark.parametrize("dtype", STORABLE_DTYPES, ids=str)
def test_every_dtype_has_the_number_of_the_page(dtype: torch.dtype) -> None:
    for shape in ((), (0, 2), (3,), (5, 3, 2)):
        tensor = random_bits(shape, dtype, 4)
        assert number(tensor) == by_the_page("w", tensor)


def changed(tensor: torch.Tensor, position: int, bit: int) -> torch.Tensor:
    """Return the tensor with one bit of one element flipped."""
    raw = np.ascontiguousarray(words(tensor)).reshape(-1).copy().view(np.uint8)
    raw[position * tensor.itemsize + bit // 8] ^= 1 << bit % 8
    return torch.from_numpy(raw).view(tensor.dtype).view(tensor.shape)


@given(data=st.data())
def test_a_flipped_bit_changes_it(data: st.DataObject) -> None:
    tensor = data.draw(tensors().filter(lambda each: each.numel() > 0 and each.dtype != torch.bool))
    position = data.draw(st.integers(0, tensor.numel() - 1))
    bit = data.draw(st.integers(0, 8 * tensor.itemsize - 1))
    assert number(changed(tensor, position, bit)) != number(tensor)


def unmixed(mixed: int) -> int:
    """Return the word that is mixed to another one: the steps backwards, each of which undoes itself."""
    mixed ^= mixed >> 32
    mixed = mixed * pow(FACTOR, -1, 2**64) % 2**64
    return mixed ^ mixed >> 32


def smallest_change(tensor: torch.Tensor, position: int) -> torch.Tensor:
    """Return the tensor with an element whose mixed bits differ in the highest one alone."""
    bits = tensor.numpy().view(np.uint64).reshape(-1).copy()
    word = int(bits[position])
    mixed = (word ^ word >> 32) * FACTOR % 2**64
    bits[position] = unmixed((mixed ^ mixed >> 32) ^ 2**63)
    return torch.from_numpy(bits.view(np.int64)).view(tensor.dtype).reshape(tensor.shape)


def check_any_change(fingerprint: Callable[[torch.Tensor], int], tensor: torch.Tensor, position: int) -> None:
    other = smallest_change(tensor, position)
    assert not torch.equal(other.view(torch.int64), tensor.view(torch.int64))
    assert fingerprint(other) != fingerprint(tensor)


@given(shapes().filter(prod), st.data())
def test_an_element_that_changes_as_little_as_can_be_changes_it(shape: tuple[int, ...], data: st.DataObject) -> None:
    tensor = random_bits(shape, torch.float64, 5)
    check_any_change(number, tensor, data.draw(st.integers(0, tensor.numel() - 1)))


def test_the_law_of_changes_catches_an_even_weight() -> None:
    def of_even_weights(tensor: torch.Tensor) -> int:
        return 2 * box_total(tensor, (0,) * tensor.ndim) % 2**64

    with pytest.raises(AssertionError):
        check_any_change(of_even_weights, random_bits((3, 2), torch.float64, 5), 1)


def test_key_dtype_and_shape_enter() -> None:
    zeros, none = torch.zeros(4, 2), torch.zeros(0, 2)
    kinds = [zeros, zeros.view(torch.int32), zeros.T, zeros.flatten(), zeros[:2], none, none.T, none.int()]
    assert len({number(each) for each in kinds}) == len(kinds)
    assert number(zeros) != shardtree.fingerprint([whole(zeros, "v")])["v"]


def test_all_weights_are_odd_and_far_from_each_other() -> None:
    weights = np.concatenate([axis_weights(axis, 0, 70_000) for axis in range(4)])
    assert (weights % 2 == 1).all()
    assert len(np.unique(weights)) == weights.size
    bits = np.unpackbits(weights.view(np.uint8)).reshape(-1, 64).mean(axis=0)
    assert np.abs(np.delete(bits, 7) - 0.5).max() < 0.01  # all but the lowest bit are as good as drawn


@pytest.mark.parametrize("shape", [(70_001,), (3, 65_540), (40_000, 2), (300, 7, 130), (17, 90, 4, 4), (1 << 19,)])
def test_long_axes_are_what_the_page_says(shape: tuple[int, ...]) -> None:
    tensor = random_bits(shape, torch.int16, 8)
    assert number(tensor) == by_the_page("w", tensor)


@given(tensors(shapes().filter(len)), st.data())
def test_devices_and_strides_make_no_difference(tensor: torch.Tensor, data: st.DataObject) -> None:
    bits = torch.from_numpy(words(tensor).view(f"i{min(8, tensor.itemsize)}" if tensor.itemsize > 1 else "u1"))
    offset = data.draw(st.tuples(*[st.integers(0, 200_000)] * bits.ndim))
    order = data.draw(st.permutations(range(bits.ndim)))
    strided = np.ascontiguousarray(words(tensor).transpose(order)).transpose(np.argsort(order))
    expected = host_total(words(tensor), range(bits.ndim), offset)
    assert device_total(bits, range(bits.ndim), offset) == expected == host_total(strided, range(bits.ndim), offset)


@settings(max_examples=EXAMPLES // 2)
@given(tensors(), st.integers(1, 9), st.data())
def test_pieces_add_up_to_the_tensor(tensor: torch.Tensor, most: int, data: st.DataObject) -> None:
    layout = data.draw(layouts(tuple(tensor.shape), 1))
    tree = rank_tree(GlobalState({"w": tensor}, {}, {}), {"w": layout}, 0)
    shards = [leaf for _, leaf in shardtree.trees.leaves_with_paths(tree) if isinstance(leaf, ShardedTensor)]
    mains = [shard for shard in shards if shardtree.is_main_replica(shard.replica_id)]
    pieces = [piece for shard in mains for piece in shard_pieces(shard, most)]
    assert sum(piece.data.numel() for piece in pieces) == tensor.numel()
    assert all(piece.data.numel() <= most for piece in pieces)
    total = sum(map(shardtree.core.fingerprints.piece_total, pieces))
    assert total % 2**64 == (box_total(tensor, (0,) * tensor.ndim) if tensor.numel() else 0)


@pytest.mark.slow
@settings(max_examples=EXAMPLES // 4)
@given(data=st.data())
def test_a_checkpoint_has_the_fingerprints_of_its_tree(data: st.DataObject) -> None:
    state, folder = data.draw(global_states(), label="state"), MemoryStorage()
    layout = data.draw(state_layouts(state, data.draw(st.integers(1, 4), label="ranks")), label="layout")
    ranks = next(iter(layout.values())).ranks
    shardtree.simulate(
        ranks,
        lambda world: shardtree.save(
            rank_tree(state, layout, world.rank), folder, world=world, options=shardtree.SaveOptions(fingerprint=True)
        ),
    )
    expected = {key: by_the_page(key, tensor) for key, tensor in state.tensors.items()}
    assert shardtree.fingerprint(folder) == expected
    assert shardtree.simulate(3, lambda world: shardtree.fingerprint(folder, world=world)) == [expected] * 3
    assert shardtree.shell.table.stored_fingerprints(shardtree.open_checkpoint(folder).metadata) == expected
    assert shardtree.verify(folder) == ()
    opened = shardtree.open_checkpoint(folder)
    assert shardtree.fingerprint([opened[key] for key in expected]) == expected  # lazy tensors

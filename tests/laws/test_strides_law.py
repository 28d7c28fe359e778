"""Strides don't matter: tensors go every way with steps that `is_contiguous()` doesn't see, and with larger ones.

An axis of one element may have any stride, and so may all axes of a tensor without elements. Torch counts such tensors
as contiguous, and refuses to view them with another item size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as some

import shardtree as st
from shardtree.core.codec import bit_view, byte_buffer, row_major_bits
from shardtree.core.lazy import as_integers, flat_bytes
from shardtree.live import _move
from shardtree.storage import MemoryStorage
from shardtree.strategies import StrategyAction, default_strategies
from shardtree.testing import STORABLE_DTYPES, check_ways, random_bits
from shardtree.testing._bits import bits
from shardtree.trees import map_shards

# What torch says, once, when it makes a tensor of half-precision complex numbers.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

EXAMPLES = settings.default.max_examples if settings.default else 100
FORMATS = [(name, version) for action, name, version in default_strategies if action is StrategyAction.SAVE_SHARDED]
DTYPES = [torch.int16, torch.float32, torch.uint8, torch.float64, torch.complex64]
SHAPES = some.lists(some.sampled_from([1, 2, 1, 3, 0]), max_size=3).map(tuple)
STEPS = some.tuples(some.integers(1, 2), some.integers(1, 9))
"""From one element to the next, and along axes that lead nowhere."""


def spread(tensor: torch.Tensor, steps: tuple[int, int]) -> torch.Tensor:
    """Return an equal tensor with these steps, whose memory has other elements in between."""
    step, nowhere = steps
    room = as_integers(random_bits((tensor.numel() * step + 1,), tensor.dtype, seed=9))
    along = [step * stride for stride in torch.empty(tensor.shape).stride()]
    strides = [nowhere if size == 1 or not tensor.numel() else by for size, by in zip(tensor.shape, along, strict=True)]
    view = room.as_strided(tuple(tensor.shape), strides, 1)
    return view.copy_(as_integers(tensor)).view(tensor.dtype)


def spread_out(tree: Any, steps: tuple[int, int]) -> Any:
    return map_shards(lambda leaf: replace(leaf, data=spread(leaf.data, steps)), tree)


@given(some.sampled_from(STORABLE_DTYPES), SHAPES, STEPS)
def test_a_tensor_s_bytes_are_the_same_with_any_strides(
    dtype: torch.dtype, shape: tuple[int, ...], steps: tuple[int, int]
) -> None:
    tensor = random_bits(shape, dtype, seed=1)
    view = spread(tensor, steps)
    for found in (flat_bytes(as_integers(view)), row_major_bits(view)):
        assert found.stride() == (1,) and found.numpy().tobytes() == bits(tensor)
    if view.is_contiguous():
        assert flat_bytes(view).data_ptr() == view.data_ptr()
        assert bit_view(view).numpy().tobytes() == bytes(byte_buffer(view)) == bits(tensor)


Case = tuple[torch.Tensor, tuple[int, int], tuple[int | None, int | None]]
"""A tensor, the steps of those that hold it, and the axis along which ranks cut it before and after."""


@some.composite
def cases(draw: some.DrawFn) -> Case:
    tensor = random_bits(draw(SHAPES), draw(some.sampled_from(DTYPES)), seed=1)
    axes = some.sampled_from([None, *range(tensor.ndim)])
    return tensor, draw(STEPS), (draw(axes), draw(axes))


def cut_along(axis: int | None) -> st.PartitionSpec:
    return st.PartitionSpec() if axis is None else st.PartitionSpec(*[None] * axis, "a")


def check_strides(case: Case, backend: tuple[str, int]) -> None:
    """Raise unless a tensor goes every way as it would with the usual strides."""
    tensor, steps, axes = case
    trees, targets = (
        st.shard({"w": whole}, st.Mesh(a=2), cut_along(axis))
        for whole, axis in zip((tensor, torch.zeros_like(tensor)), axes, strict=True)
    )
    held = [spread_out(tree, steps) for tree in trees]
    check_ways(held, [spread_out(tree, steps) for tree in targets], backend=backend[0], version=backend[1])
    sums, *_ = st.simulate(2, lambda world: st.fingerprint(held[world.rank], world=world))
    assert sums == st.fingerprint(st.shard({"w": tensor}, st.Mesh(a=1), st.PartitionSpec())[0])
    assert not [where for one, other in zip(held, trees, strict=True) for where in st.diff(one, other).mismatch]
    place, other = MemoryStorage(), MemoryStorage()
    st.simulate(2, lambda world: st.save(held[world.rank], place, backend, world=world))
    st.convert(place, other, backend="safetensors")
    assert bits(st.load_plain_tensors(other)["w"]) == bits(tensor)
    for way in (
        lambda given, world: st.load(given, place, donate=True, world=world),
        lambda given, world: st.redistribute(held[world.rank], given, donate=True, world=world),
    ):
        donated = [spread_out(tree, steps) for tree in targets]
        st.simulate(2, lambda world, way=way, donated=donated: way(donated[world.rank], world))
        assert bits(st.unshard(donated)["w"]) == bits(tensor)


@pytest.mark.slow
@settings(max_examples=EXAMPLES // 4, phases=[Phase.generate])
@given(cases(), some.sampled_from(FORMATS))
def test_strides_do_not_matter_on_any_way(case: Case, backend: tuple[str, int]) -> None:
    check_strides(case, backend)


ONE = (torch.arange(1, dtype=torch.int16), (1, 2), (None, 0))
COLUMN = (torch.arange(4, dtype=torch.int16).view(2, 2), (2, 2), (0, 1))
EMPTY = (torch.empty(2, 0), (1, 3), (0, None))


@pytest.mark.slow
@pytest.mark.parametrize("case", [ONE, COLUMN, EMPTY], ids=["one element", "one column", "no elements"])
def test_strides_do_not_matter_in_our_format(case: Case) -> None:
    check_strides(case, FORMATS[0])


@pytest.mark.slow
@pytest.mark.parametrize("backend", FORMATS[1:], ids=str)
def test_nor_in_any_other(backend: tuple[str, int]) -> None:
    check_strides(COLUMN, backend)


def test_tied_weights_of_one_element_may_be_views_with_other_strides() -> None:
    place = MemoryStorage()
    weight = torch.arange(4, dtype=torch.int16)
    st.save(tied(weight), place)
    target = torch.zeros_like(weight)
    loaded = st.load(tied(target), place, donate=True)
    assert target.tolist() == [0, 0, 2, 0] and loaded["head"].data_ptr() == loaded["tail"].data_ptr()


def tied(memory: torch.Tensor) -> dict[str, Any]:
    views = {"head": memory[2:3], "tail": memory[::2][1:]}
    return {key: st.ShardedTensor.from_rank_offsets(key, view) for key, view in views.items()}


def test_the_law_catches_a_view_of_what_counts_as_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_move, "flat_bytes", lambda tensor: tensor.reshape(-1).view(torch.uint8))
    with pytest.raises(RuntimeError):
        check_strides(COLUMN, FORMATS[0])

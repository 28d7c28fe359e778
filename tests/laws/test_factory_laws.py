"""Factories: merging undoes building, for parameters and their optimizer states, and layouts may change between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardtree
from shardtree.mapping import ShardedTensor, ShardedTensorFactory
from shardtree.testing import (
    check_factory,
    check_layouts_agree,
    dtypes,
    factories,
    glu,
    random_bits,
    transposed,
)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

PRINTABLE = st.sampled_from([torch.float32, torch.bfloat16, torch.int8])


@given(factories(dtype=dtypes()))
def test_merge_undoes_build(factory: ShardedTensorFactory) -> None:
    check_factory(factory)


@given(st.data())
def test_merge_undoes_build_on_flat_ranges(data: st.DataObject) -> None:
    shape = 2 * data.draw(st.integers(1, 3)), data.draw(st.integers(0, 3))
    volume = shape[0] * shape[1]
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, volume)] * 2)))
    ranks = data.draw(st.integers(1, 3))
    factory = glu("w", random_bits(shape, data.draw(PRINTABLE), 1), data.draw(st.integers(0, ranks - 1)), ranks)
    check_factory(factory, flat=[slice(start, stop), slice(0, volume)])


def swapped(factory: ShardedTensorFactory) -> ShardedTensorFactory:
    return replace(factory, merge_fn=lambda parts: factory.merge_fn(list(parts)[::-1]))


def forgetful(factory: ShardedTensorFactory) -> ShardedTensorFactory:
    """Build from the parameter, whatever tensor is given."""
    return replace(factory, build_fn=lambda key, data, *rest: factory.build_fn(key, factory.data, *rest))


def cut_by_dtype(factory: ShardedTensorFactory) -> ShardedTensorFactory:
    def build(key: str, data: Any, *rest: Any) -> Any:
        as_one = [ShardedTensor.from_rank_offsets(key, data)]
        return factory.build_fn(key, data, *rest) if data.dtype == factory.data.dtype else as_one

    return replace(factory, build_fn=build)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (swapped, "merge does not undo build for 'w'"),
        (forgetful, "merge does not undo build for 'optimizer"),
        (cut_by_dtype, "is cut differently from 'w'"),
    ],
)
def test_the_law_catches(fault: Callable[[ShardedTensorFactory], ShardedTensorFactory], message: str) -> None:
    factory = glu("w", torch.arange(12).view(4, 3))
    check_factory(factory)
    with pytest.raises(AssertionError, match=message):
        check_factory(fault(factory))


def test_the_law_catches_flat_ranges_that_are_ignored() -> None:
    factory = glu("w", torch.arange(12.0).view(4, 3))
    # What a transposing factory does with flat data can't be right, and must not pass.
    with pytest.raises((AssertionError, IndexError, shardtree.CheckpointingException)):
        check_factory(transposed("w", factory.data), flat=[slice(2, 7)])


def gate_and_value(rank: int, ranks: int, gate: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.cat([half.chunk(ranks)[rank] for half in (gate, value)])


Gated = Callable[[str, torch.Tensor, int, int], ShardedTensorFactory]


def check_gated_halves(factory: Gated, counts: Sequence[int]) -> None:
    """Raise unless each rank gets its rows of both halves, on whatever number of ranks they were saved."""
    whole = torch.arange(24).view(8, 3), -torch.arange(24).view(8, 3)

    def hold(halves: tuple[torch.Tensor, torch.Tensor], ranks: int) -> list[torch.Tensor]:
        return [gate_and_value(rank, ranks, *halves) for rank in range(ranks)]

    check_layouts_agree(whole, hold, partial(factory, "w"), ranks=counts)


def halves_in_one(key: str, data: torch.Tensor, rank: int, ranks: int) -> ShardedTensorFactory:
    """The planted fault: each rank's two halves are stored as one block of rows."""

    def build(key: str, data: Any, replica_id: Any, flattened_range: slice | None) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(key, data, (0, rank, ranks), replica_id=replica_id)

    return ShardedTensorFactory(key, data, build, lambda tensor: tensor)


@pytest.mark.parametrize("counts", [(2, 4), (4, 1), (1, 2, 8)])
def test_gated_halves_survive_another_number_of_ranks(counts: tuple[int, ...]) -> None:
    check_gated_halves(glu, counts)


@pytest.mark.parametrize("counts", [(2, 4), (4, 1), (1, 2, 8)])
def test_the_law_catches_halves_that_are_stored_in_one(counts: tuple[int, ...]) -> None:
    check_gated_halves(halves_in_one, [2])
    with pytest.raises(AssertionError, match=rf"saved on {counts[0]} ranks?, loaded on {counts[1]}: rank"):
        check_gated_halves(halves_in_one, counts)

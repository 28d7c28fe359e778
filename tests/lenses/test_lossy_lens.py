"""A lens that quantises: what must hold of it, and the faults that each law finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hy

import shardtree as st
from shardtree.core.lazy import computed
from shardtree.lenses import Lens, StoredForm
from shardtree.storage import MemoryStorage
from shardtree.testing import check_lens, cut, even_layout

FP8 = torch.float8_e4m3fn
Scale = Callable[[torch.Tensor], torch.Tensor]


def by_power(rows: torch.Tensor) -> torch.Tensor:
    largest = rows.abs().amax(1, keepdim=True).float()
    return torch.where(largest > 0, torch.exp2(torch.floor(torch.log2(largest)) - 8), 1.0)


def by_largest(rows: torch.Tensor) -> torch.Tensor:
    return rows.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / 440  # which FP8 rounds to 448


def quantised(scale: Scale, off: float = 1.0) -> Lens:
    def lens(shard: st.ShardedTensor) -> StoredForm:
        rows, columns = shard.local_shape
        scales = replace(
            shard,
            key=f"{shard.key}_scale",
            data=computed(scale, shard.data, (rows, 1), torch.float32),
            dtype=torch.float32,
            local_shape=(rows, 1),
            global_shape=(shard.global_shape[0], 1),
            global_offset=(shard.global_offset[0], 0),
        )

        def values(held: torch.Tensor) -> torch.Tensor:
            return (held.float() / scale(held)).clamp(-448, 448).to(FP8)

        stored = replace(shard, data=computed(values, shard.data, (rows, columns), FP8), dtype=FP8)
        return StoredForm((stored, scales), lambda parts: (parts[0].float() * (parts[1] * off)).to(shard.dtype))

    return lens


def most(rows: torch.Tensor) -> torch.Tensor:
    return rows.abs().amax(1, keepdim=True) / 8


def rows_of(whole: torch.Tensor, ranks: int, axis: int = 0) -> list[st.ShardedTensor]:
    layout = even_layout(tuple(whole.shape), ranks, axis=axis)
    return [shard for rank in range(ranks) for shard in cut(layout, "w", whole, rank)]


def weights(seed: int, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed)).mul(10.0 ** (seed % 7 - 3)).bfloat16()


@given(seed=hy.integers(0, 10_000), ranks=hy.sampled_from([1, 2, 3, 6]))
def test_a_lens_that_quantises_rows_keeps_the_lossy_laws(seed: int, ranks: int) -> None:
    check_lens(quantised(by_power), rows_of(weights(seed), ranks), lossy=most)


def test_rows_of_zeros_keep_them_too() -> None:
    check_lens(quantised(by_power), rows_of(torch.zeros(4, 8).bfloat16(), 2), lossy=most)


@pytest.mark.parametrize(
    ("lens", "axis", "bound", "said"),
    [
        (
            quantised(by_power),
            0,
            lambda rows: rows.abs() / 1000,
            "elements of 'w' lose more than `lossy` allows, first",
        ),
        (quantised(by_power, off=2.0), 0, most, "lose more than `lossy` allows"),
        (quantised(by_largest), 0, most, "not idempotent: loaded tensors are stored differently, on 'w"),
        (quantised(lambda rows: by_power(rows) * torch.nan), 0, most, "lose more than `lossy` allows"),
        (quantised(by_power), 1, most, "the lens does not commute with cuts on 'w', box (6, 4) at (0, 0)"),
    ],
    ids=["a bound too small", "scales off by an octave", "scales that move", "no numbers", "a cut through the rows"],
)
def test_the_laws_name_the_fault(lens: Lens, axis: int, bound: Scale, said: str) -> None:
    with pytest.raises(AssertionError) as caught:
        check_lens(lens, rows_of(weights(3), 2, axis), lossy=bound)
    assert said in str(caught.value)


def test_a_lens_that_loses_is_no_lens_that_loses_nothing() -> None:
    with pytest.raises(AssertionError, match="merge"):
        check_lens(quantised(by_power), rows_of(weights(3), 2))


def test_a_conversion_stores_what_a_save_does() -> None:
    whole, lens = weights(4), quantised(by_power)
    plain, saved, converted = MemoryStorage(), MemoryStorage(), MemoryStorage()
    shard = st.ShardedTensor.from_rank_offsets("w", whole)
    st.save({"w": shard}, plain)
    st.save({"w": st.lenses.as_factory(shard, lens)}, saved)
    to_fp8 = partial(st.map_shards, partial(st.lenses.as_factory, lens=lens))
    st.convert(plain, converted, backend="safetensors", transform=lambda tree: st.apply_factories(to_fp8(tree)))
    assert not st.diff(st.load_plain_tensors(converted), st.load_plain_tensors(saved))

"""Ranks that read for each other cut large tensors between them: in every format, with and without checks and casts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.shell.storage import BLOCK_BYTES, Verify
from shardtree.storage import MemoryStorage
from shardtree.testing import first_difference, random_bits
from tests.shell.checkpoint.parts import ALL_FORMATS as FORMATS
from tests.shell.checkpoint.parts import counted

SHAPES = {"a": (1200, 1000), "b": (640, 1024)}
"""Of 4.8 and 2.6 MB: each of four ranks reads a part of one of them, or of both."""

WHOLE = {key: random_bits(shape, torch.float32, seed) for seed, (key, shape) in enumerate(SHAPES.items())}


def bytes_read(storage: Any) -> int:
    """Return how much is read of the files that tensors lie in."""
    return sum(count for name, count in storage.counts.items() if (storage.inner.length(name) or 0) > 2**18)


def shard_of(key: str, rank: int, ranks: int, axis: int | None, dtype: torch.dtype) -> st.ShardedTensor:
    """Return what a rank wants: all of it, or one of two halves along an axis, that each half of the ranks wants."""
    shape = list(SHAPES[key])
    cuts: list[tuple[int, int, int]] = []
    if axis is not None:
        shape[axis] //= 2
        cuts = [(axis, rank % 2, 2)]
    data = torch.zeros(shape, dtype=dtype)
    return st.ShardedTensor.from_rank_offsets(key, data, *cuts, replica_id=rank if axis is None else rank // 2)


@cache
def saved(backend: tuple[str, int]) -> MemoryStorage:
    folder = MemoryStorage()
    tree = {key: st.ShardedTensor.from_rank_offsets(key, data) for key, data in WHOLE.items()}
    st.save(tree, folder, backend)
    return folder


def load_on(
    ranks: int, folder: Any, axis: int | None, exchange: Any, verify: Verify, dtype: torch.dtype = torch.float32
) -> list[tuple[Any, st.storage.ReadReport]]:
    def on_rank(world: st.World) -> tuple[Any, st.storage.ReadReport]:
        reports: list[st.storage.ReadReport] = []
        options = st.LoadOptions(exchange=exchange, verify=verify, report=reports.append)
        target = {key: shard_of(key, world.rank, ranks, axis, dtype) for key in WHOLE}
        loaded = st.load(target, folder, world=world, cast=dtype != torch.float32, options=options)
        return loaded, reports[0]

    return st.simulate(ranks, on_rank)


RANKS: list[tuple[int, int | None]] = [(2, None), (3, None), (4, 0), (4, 1)]
"""How many there are, and along which axis they want halves."""

CHECKS: list[tuple[Verify, torch.dtype]] = [*((verify, torch.float32) for verify in (None, "whole", "all"))]
CHECKS += [(None, torch.bfloat16)]

# Each format with each check, in turns with other ranks: any two of the three are together in a case.
CASES = [
    (backend, *check, *RANKS[(first + second) % len(RANKS)])
    for first, backend in enumerate(FORMATS)
    for second, check in enumerate(CHECKS)
]
TOTAL = sum(data.nbytes for data in WHOLE.values())


def check_reads(found: Any, alone: Any, reports: Sequence[st.storage.ReadReport], verify: Verify) -> None:
    """Raise unless ranks read what one rank of each set that wants the same would read alone, or little more."""
    assert sum(report.bytes_read for report in reports) == TOTAL
    again = len(reports) * 2**16  # the files' headers
    if verify is not None:
        # A rank reads some of two tensors here: of each both ends may lie in a block that another one checks too.
        again += 4 * len(reports) * BLOCK_BYTES
    assert bytes_read(found) <= bytes_read(alone) + again


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "verify", "dtype", "ranks", "axis"), CASES)
def test_ranks_that_read_for_each_other_get_what_each_would_read_itself(
    backend: tuple[str, int], verify: Verify, dtype: torch.dtype, ranks: int, axis: int | None
) -> None:
    """Also where tensors are converted, which are cut as they are stored."""
    alone, storage = counted(saved(backend)), counted(saved(backend))
    plain = load_on(1 if axis is None else 2, alone, axis, "never", verify, dtype)
    found = load_on(ranks, storage, axis, "always", verify, dtype)
    for rank, (loaded, _) in enumerate(found):
        expected, _ = plain[rank % len(plain)]
        assert all(first_difference(loaded[key], expected[key]) is None for key in WHOLE)
    check_reads(storage, alone, [report for _, report in found], verify)


def test_the_check_of_reads_sees_ranks_that_each_read_all() -> None:
    alone, storage = counted(saved(FORMATS[0])), counted(saved(FORMATS[0]))
    load_on(1, alone, None, "never", None)
    reports = [report for _, report in load_on(2, storage, None, "never", None)]
    for each in (reports, [st.storage.ReadReport(TOTAL)]):
        with pytest.raises(AssertionError):
            check_reads(storage, alone, each, None)


@pytest.mark.parametrize("backend", FORMATS, ids=lambda backend: backend[0])
def test_what_is_compared_by_one_rank_is_compared_by_those_that_share_it_out(backend: tuple[str, int]) -> None:
    (_, alone), *_ = load_on(1, saved(backend), None, "never", "all")
    together = [report for _, report in load_on(3, saved(backend), None, "always", "all")]
    assert sum(report.blocks_checked for report in together) >= alone.blocks_checked
    assert bool(alone.blocks_unchecked) == any(report.blocks_unchecked for report in together)

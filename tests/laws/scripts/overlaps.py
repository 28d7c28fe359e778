"""Run by torchrun: ranks load boxes that overlap, read each stored byte once between them, and compare all elements."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardtree as st
from shardtree.storage import LocalStorage
from shardtree.testing import first_difference, random_bits
from tests.shell.checkpoint.parts import noting

ROWS, WIDTH = 1200, 1000
DTYPES = {"a": torch.float32, "b": torch.bfloat16}
WHOLE = {key: random_bits((ROWS, WIDTH), dtype, 3) for key, dtype in DTYPES.items()}
SPANS = [(0, 600), (300, 900), (0, 1200), (100, 1000)]
"""Which rows each rank wants."""
COLUMNS = [(0, 500), (250, 750), (0, 1000), (400, 1000)]
UNION = sum(tensor.nbytes for tensor in WHOLE.values())


def replicas(rank: int) -> dict[str, st.ShardedTensor]:
    return {key: st.ShardedTensor.from_rank_offsets(key, whole, replica_id=rank) for key, whole in WHOLE.items()}


def target(rank: int, axis: int) -> dict[str, Any]:
    """Return what a rank wants: rows, or columns."""
    low, high = (SPANS, COLUMNS)[axis][rank]
    shape, offset = [ROWS, WIDTH], [0, 0]
    shape[axis], offset[axis] = high - low, low
    return {
        key: st.ShardedTensor(key, None, dtype, tuple(shape), (ROWS, WIDTH), tuple(offset), None)
        for key, dtype in DTYPES.items()
    }


def summed(number: int) -> int:
    found = torch.tensor(number)
    dist.all_reduce(found)
    return int(found)


def load(folder: Path, axis: int, exchange: Any) -> None:
    """Load, and raise unless each stored byte was read once, as foretold, and each element is right."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    counts, reports = list[int](), list[st.storage.ReadReport]()
    storage = noting(
        LocalStorage(str(folder)), lambda name, *span: counts.append(span[1] - span[0]) if "-of-" in name else None
    )
    options = st.LoadOptions(exchange=exchange, verify=None, report=reports.append)
    how: dict[str, Any] = {"validate_access_integrity": False, "options": options}
    foretold = st.explain_ranks([target(each, axis) for each in range(ranks)], folder, **how).reads[rank]
    loaded = st.load(target(rank, axis), storage, **how)
    for key, shard in target(rank, axis).items():
        first = first_difference(loaded[key], WHOLE[key][shard.global_slice()])
        assert first is None, f"rank {rank}: {key!r}: {first}"
    (report,) = reports
    read, stored = summed(report.bytes_read), summed(sum(counts))
    # Of columns, what lies between their parts of rows is in the ranges that are mapped.
    assert read == UNION, f"{read} bytes are loaded for {UNION}"
    assert axis or stored == UNION, f"{stored} bytes are read for {UNION}"
    assert foretold.cost is not None
    found = (report.bytes_read, report.bytes_sent, report.bytes_received)
    assert found == (foretold.cost.bytes_wanted, foretold.sent, foretold.received)
    level = torch.tensor(report.bytes_read)
    dist.all_reduce(level, dist.ReduceOp.MAX)
    # A stripe of a MiB is more than a twentieth of so little.
    assert int(level) <= UNION / ranks + 2**20


def choose(folder: Path) -> None:
    """Load replicas as ranks choose: all choose the same, say why, and get every element."""
    rank = dist.get_rank()
    reports: list[st.storage.ReadReport] = []
    shards = {
        key: st.ShardedTensor.from_rank_offsets(key, torch.zeros_like(w), replica_id=rank) for key, w in WHOLE.items()
    }
    for _ in range(2):
        loaded = st.load(shards, folder, options=st.LoadOptions(report=reports.append))
        assert all(first_difference(loaded[key], WHOLE[key]) is None for key in WHOLE)
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, [report.exchange for report in reports])
    assert len({why for each in said for why in each}) == 1 and "storage is local" in said[0][0], said


STEPS = {
    "rows": partial(load, axis=0, exchange="always"),
    "columns": partial(load, axis=1, exchange="always"),
    "alone": partial(load, axis=0, exchange="never"),
    "choose": choose,
}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    if not st.is_checkpoint(sys.argv[1]):
        dist.barrier()
        st.save(replicas(dist.get_rank()), sys.argv[1], options=st.SaveOptions(durable=False))
    for name in sys.argv[2:]:
        STEPS[name](Path(sys.argv[1]))
        dist.barrier()
    dist.destroy_process_group()

"""Reading a few rows out of a large tensor that was saved whole: beside raw reads, and beside DCP."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from statistics import median

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardtree as st
from shardtree.world import one_process

from ._bars import Bar, Settings
from ._turns import Seconds, in_turns, ratio

MOST_OF_RAW, MOST_OF_DCP = 2.0, 0.01
MOST_MICROSECONDS = {None: 25.0, "whole": 100.0}
"""Of 64 KiB of rows, by what is checked: what raw reads take there is as much the machine's as the file's."""

PARTS = 64
ROWS, COLUMNS = 65_536, 4_096  # of float32: 1 GiB

RAW, DCP = "raw preadv into a new tensor", "DCP"
UNCHECKED, CHECKED = "verify=None", "default"
NATIVE = "our format"
VERIFY: dict[str, st.Verify] = {UNCHECKED: None, CHECKED: "whole"}

_SMALL_BYTES, _MEDIUM_BYTES = 64 * 1024, 1024 * 1024

ReadRows = Callable[[int], torch.Tensor]
"""From the first row of a block to its elements."""

Place = tuple[str, int]
"""A data file, and where the tensor begins in it."""


def large_bars(settings: Settings, folder: Path) -> list[Bar]:
    """Return the bars of one tensor of 1 GiB: blocks of its rows, and a 64th of them loaded."""
    shape = (256, 64) if settings.quick else (ROWS, COLUMNS)
    tensor = torch.arange(shape[0] * shape[1], dtype=torch.int32).view(torch.float32).reshape(shape)
    st.save(
        {"w": st.ShardedTensor.from_rank_offsets("w", tensor)}, folder / "ours", options=st.SaveOptions(durable=False)
    )
    _save_dcp(tensor, folder / "dcp")
    return [*_block_bars(settings, folder / "ours", tensor), *_load_bars(settings, folder, tensor)]


def _block_bars(settings: Settings, folder: Path, tensor: torch.Tensor) -> list[Bar]:
    row, found = tensor[0].nbytes, []
    counted = ((4, 2), (16, 2)) if settings.quick else ((4, 20), (64, 10), (1024, 2))
    rounds, tries = (1, 1) if settings.quick else (9, 20)
    opened = {
        name: st.open_checkpoint(folder, options=st.LoadOptions(verify=verify))["w"].data
        for name, verify in VERIFY.items()
    }
    for rows, blocks in counted:
        raw = partial(_raw_block, _place_of(folder, tensor), tensor.shape[1], rows)
        reads: dict[str, ReadRows] = {RAW: raw} | {name: partial(_block, lazy, rows) for name, lazy in opened.items()}
        for read in reads.values():
            _check(read(7), tensor[7 : 7 + rows])
        # New places each time: what was read a moment ago would come out of the processor's cache.
        places = partial(_places, Random(rows), tensor.shape[0] - rows, blocks)
        actions = {name: partial(_read_all, read, places) for name, read in reads.items()}
        seconds = in_turns(actions, rounds=rounds, tries=tries)
        found += [_block_row(seconds, name, rows * row, blocks) for name in VERIFY]
    return found


def _block_row(seconds: Seconds, name: str, nbytes: int, blocks: int) -> Bar:
    what = f"read {nbytes // 1024:,} KiB of rows of an open checkpoint, {name}"
    ours, raw = (1e6 * median(seconds[which]) / blocks for which in (name, RAW))
    if nbytes <= _SMALL_BYTES:
        return Bar(what, RAW, ours, raw, ours, MOST_MICROSECONDS[VERIFY[name]], "µs")
    most = MOST_OF_RAW if nbytes <= _MEDIUM_BYTES and name == UNCHECKED else None
    return Bar(what, RAW, ours, raw, ratio(seconds, name, RAW), most, "µs")


def _places(random: Random, end: int, blocks: int) -> list[int]:
    return [random.randrange(end) for _ in range(blocks)]


def _read_all(read: ReadRows, places: Callable[[], list[int]]) -> None:
    for begin in places():
        read(begin)


def _block(lazy: st.LazyTensor, rows: int, begin: int) -> torch.Tensor:
    return lazy[begin : begin + rows].read()


def _raw_block(place: Place, columns: int, rows: int, begin: int) -> torch.Tensor:
    file, start = place
    block = torch.empty(rows, columns)
    descriptor = os.open(file, os.O_RDONLY)
    os.preadv(descriptor, [memoryview(block.numpy()).cast("B")], start + begin * columns * 4)
    os.close(descriptor)
    return block


def _place_of(folder: Path, tensor: torch.Tensor) -> Place:
    (file,) = folder.glob("*/00000-of-00001.safetensors")
    return str(file), file.stat().st_size - tensor.nbytes


def _load_bars(settings: Settings, folder: Path, tensor: torch.Tensor) -> list[Bar]:
    rounds, tries = (1, 1) if settings.quick else (5, 4)
    number, rows = PARTS // 3, tensor.shape[0] // PARTS
    expected, target = tensor[number * rows : (number + 1) * rows], torch.zeros(rows, tensor.shape[1])
    with _one_of_many(number, target) as sharded:
        actions = {DCP: partial(_load_dcp, folder / "dcp", sharded)}
        for format_name, place in ((NATIVE, folder / "ours"), ("DCP's format", folder / "dcp")):
            actions |= {
                f"{format_name}, {name}": partial(_load, place, target, number, verify)
                for name, verify in VERIFY.items()
            }
        for action in actions.values():
            target.zero_()
            _check(action(), expected)
        seconds = in_turns(actions, rounds=rounds, tries=tries)
    return [_load_row(seconds, name) for name in actions if name != DCP]


def _load_row(seconds: Seconds, name: str) -> Bar:
    most = MOST_OF_DCP if name.endswith(UNCHECKED) else None  # DCP checks nothing either
    what = f"load 1/{PARTS} of the rows of 1 GiB saved whole, {name}"
    return Bar(what, DCP, median(seconds[name]), median(seconds[DCP]), ratio(seconds, name, DCP), most)


@contextmanager
def _one_of_many(rank: int, local: torch.Tensor) -> Iterator[DTensor]:
    """Give the DTensor of one of 64 ranks, of which there are no others: the group does nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=PARTS)
    try:
        mesh = init_device_mesh("cpu", (PARTS,))
        yield DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    finally:
        dist.destroy_process_group()


def _save_dcp(tensor: torch.Tensor, folder: Path) -> None:
    with warnings.catch_warnings(action="ignore"):  # that there is no process group
        dcp.save({"w": tensor}, checkpoint_id=folder, no_dist=True)


def _load_dcp(folder: Path, sharded: DTensor) -> torch.Tensor:
    state = {"w": sharded}
    with warnings.catch_warnings(action="ignore"):
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state["w"].to_local()


def _load(folder: Path, target: torch.Tensor, number: int, verify: st.Verify) -> torch.Tensor:
    shard = st.ShardedTensor.from_rank_offsets("w", target, (0, number, PARTS))
    # The other ranks' rows are nobody's here, so that shards don't tile the tensor.
    keywords = {"donate": True, "validate_access_integrity": False, "world": one_process()}
    loaded: torch.Tensor = st.load({"w": shard}, folder, options=st.LoadOptions(verify=verify), **keywords)["w"]
    return loaded


def _check(found: torch.Tensor, expected: torch.Tensor) -> None:
    # As integers: among these floats are some that don't equal themselves.
    if not torch.equal(found.view(torch.int32), expected.view(torch.int32)):
        raise ValueError("not the elements that were saved")

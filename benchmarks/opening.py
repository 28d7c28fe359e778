"""Opening large checkpoints, and reading a little out of them: ``python -m benchmarks.opening``.

Names, shapes and dtypes of 100,000 tensors, beside the header of one safetensors file of the same; checkpoints of one
and two million chunks; `.metadata` of torch_dist and DCP of up to a million chunks, beside ``pickle``; a Hugging Face
model of 50,000 tensors; a few rows of a tensor of 1 GiB, beside raw reads of the same rows into new tensors; and a 64th
of its rows, beside DCP, which reads the whole: in one process, for the DTensor of one of 64 ranks of a group that does
nothing. Files are in the page cache. Rows are read at places that no read before was near.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, cast

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardtree as st
from shardtree.core.codec import HeaderEntry, encode_header
from shardtree.formats.torch_dist._metadata_write import WrittenContents, encode_index_file
from shardtree.layouts import ShardColumns, TensorKind
from shardtree.shell.storage import BLOCK_BYTES, Verify, digest
from shardtree.shell.table import decode_metadata, encode_metadata
from shardtree.shell.table.index import build_index, encode_index
from shardtree.storage import StoredFile
from shardtree.world import one_process

from ._measuring import Bar, Seconds, Settings, in_turns, print_bars, ratio, run

KEYS, CHUNKS = 100_000, 2_000_000
MOST_TIMES, MOST_SECONDS = 1.5, 0.5

HEADER, NAMES = "safetensors: names, shapes, dtypes", "safetensors: names"
ITEMS, METADATA = "open_checkpoint, shape and dtype of its items()", "load_tensors_metadata, shape and dtype of all"
LISTED = "open_checkpoint, list"

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I8": torch.int8}
_FILES = 64


def key_bars(settings: Settings, folder: Path) -> list[Bar]:
    """Return the bars of a checkpoint of many small tensors, beside the header of the same in one safetensors file."""
    keys, rounds, tries = (200, 1, 1) if settings.quick else (KEYS, 5, 3)
    ours, theirs = folder / "keys", folder / "keys.safetensors"
    tensors = dict(sorted((f"model.layers.{number}.weight", _small(number)) for number in range(keys)))
    st.save(
        [st.ShardedTensor.from_rank_offsets(*item) for item in tensors.items()],
        ours,
        options=st.SaveOptions(durable=False),
    )
    safetensors.torch.save_file(tensors, theirs)
    expected = [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()]
    actions = _key_actions(ours, theirs)
    for name, action in actions.items():
        _check(name, sorted(action(), key=str), sorted(expected if _tells_kinds(name) else tensors, key=str))
    return _key_rows(f"{keys:,} keys", in_turns(actions, rounds=rounds, tries=tries))


def _kinds(tensors: Mapping[str, Any]) -> list[object]:
    return [(key, tensor.global_shape, tensor.dtype) for key, tensor in tensors.items()]


def _key_actions(ours: Path, theirs: Path) -> dict[str, Callable[[], Iterable[Any]]]:
    return {
        HEADER: lambda: _header(theirs),
        NAMES: lambda: _names(theirs),
        ITEMS: lambda: _kinds(st.open_checkpoint(ours)),
        METADATA: lambda: _kinds(st.load_tensors_metadata(ours)),
        LISTED: partial(_listed, ours),
    }


def _key_rows(what: str, seconds: Seconds) -> list[Bar]:
    def row(name: str, other: str, most: float | None) -> Bar:
        ours, theirs = median(seconds[name]), median(seconds[other])
        return Bar(f"{what}: {name}", other, ours, theirs, ratio(seconds, name, other), most)

    return [row(ITEMS, HEADER, MOST_TIMES), row(METADATA, HEADER, MOST_TIMES), row(LISTED, NAMES, None)]


def _tells_kinds(name: str) -> bool:
    return name not in (NAMES, LISTED)


def _small(number: int) -> torch.Tensor:
    shape = [(1 + number % 97, 4), (1 + number % 89,), (2, 1 + number % 83, 2)][number % 3]
    return torch.zeros(shape, dtype=[*_DTYPES.values()][number // 3 % 3])


def _listed(place: Path) -> list[str]:
    return list(st.open_checkpoint(place))


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def _header(file: Path) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    found = []
    with safe_open(file, "pt") as opened:
        for key in opened.keys():  # noqa: SIM118 - it isn't a mapping
            part = opened.get_slice(key)
            found.append((key, tuple(part.get_shape()), _DTYPES[part.get_dtype()]))
    return found


def chunk_bars(settings: Settings, folder: Path) -> list[Bar]:
    """Return the bars of an index of very many chunks, in a few tensors and each in a tensor of its own."""
    most, rounds, tries = (1000, 1, 1) if settings.quick else (CHUNKS, 5, 3)
    found: list[Bar] = []
    for tensors, chunks in ((most // 200, most // 2), (most // 2, most // 2), (most, most)):
        place = folder / f"{tensors} tensors"
        sparse_checkpoint(place, tensors, chunks // tensors)
        tree = st.open_checkpoint(place)
        _check("chunks", len(tree.metadata.index.chunk_key), chunks)  # type: ignore[attr-defined]
        _check("tensors", len(list(tree)), tensors)
        actions: dict[str, Callable[[], object]] = {
            "open": partial(st.open_checkpoint, place),
            "open, list": partial(_listed, place),
        }
        seconds = in_turns(actions, rounds=rounds, tries=tries)
        what, bars = f"{chunks:,} chunks of {tensors:,} tensors", (("open", MOST_SECONDS), ("open, list", None))
        for name, bar in bars:
            taken = median(seconds[name])
            found.append(Bar(f"{what}: {name}", "", taken, None, taken, bar))
    return found


def sparse_checkpoint(folder: Path, tensors: int, chunks: int) -> None:
    """Make a checkpoint whose index is as a save writes it, and whose data files have their lengths and no content.

    Args:
        folder: where it goes; not there yet.
        tensors: how many there are, matrices of float32.
        chunks: into which each one's rows are cut.
    """
    st.save({"step": 1}, folder, options=st.SaveOptions(durable=False))
    fields = decode_metadata((folder / "metadata.json").read_bytes(), "metadata.json")
    count = tensors * chunks
    length = 4096 + -(-count // _FILES) * 128
    names = [f"{fields['save_id']}/{number:05d}-of-{_FILES:05d}.safetensors" for number in range(_FILES)]
    hashes = np.zeros(-(-length // BLOCK_BYTES), dtype=np.uint64)
    for name in names:
        with open(folder / name, "wb") as file:
            file.truncate(length)
    row = np.arange(count)
    byte = 4096 + row // _FILES * 128
    files = [StoredFile(name, length, hashes) for name in names]
    data = encode_index(build_index(row_shards(tensors, chunks), row % _FILES, byte, files=files))
    entry = fields["index"] | {"length": len(data), "digest": digest(data)}
    (folder / entry["name"]).write_bytes(data)
    (folder / "metadata.json").write_bytes(encode_metadata(fields | {"index": entry}))


def row_shards(tensors: int, chunks: int) -> ShardColumns:
    """Return matrices of float32 that are cut by rows, each into so many chunks."""
    row = np.arange(tensors * chunks)
    minus = np.full(row.size, -1)
    return ShardColumns(
        keys=tuple(sorted(f"model.layers.{number}.weight" for number in range(tensors))),
        kinds=(TensorKind(torch.float32, (4 * chunks, 8), 0),) * tensors,
        key=row // chunks,
        offset=np.stack([row % chunks * 4, np.zeros_like(row)], axis=1),
        shape=np.tile([4, 8], (row.size, 1)),
        start=minus,
        stop=minus,
        rank=row % _FILES,
        main=np.ones(row.size, dtype=np.bool_),
    )


def _check(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise ValueError(f"{what}: not what was saved")


KINDS = ((1_000, 100), (100_000, 1))
"""How many tensors, of how many chunks each."""

MILLION = (10_000, 100)
MOST_OF_PICKLE, MOST_SECONDS = 1.0, 1.0
MODEL = 50_000, 200
"""Tensors and files of a Hugging Face model."""

OPEN, LOADS = "open_checkpoint", "pickle.loads of the same file"
WRITE, DUMPS = "write", "pickle.dumps of torch's Metadata"


def metadata_bars(settings: Settings, folder: Path) -> list[Bar]:
    """Return the bars of `.metadata`: opened beside ``pickle.loads``, and written beside ``pickle.dumps``."""
    found = []
    for tensors, chunks in ((4, 5), (20, 1)) if settings.quick else (*KINDS, MILLION):
        place = folder / f"{tensors}-{chunks}"
        place.mkdir()
        stored = stored_chunks(tensors, chunks)
        write = partial(encode_index_file, stored, "save", None, {key: (key,) for key in stored.columns.keys})
        metadata = pickle.loads(write())
        # As torch writes it, whose objects have numbers that ours needn't give them.
        (place / ".metadata").write_bytes(pickle.dumps(metadata))
        actions: dict[str, Callable[[], object]] = {
            OPEN: partial(_opened, place, tensors),
            LOADS: partial(_unpickled, place),
            WRITE: write,
            DUMPS: partial(pickle.dumps, metadata),
        }
        several = tensors * chunks < 1_000_000 and not settings.quick
        seconds = in_turns(actions, rounds=3 if several else 1, tries=2 if several else 1)
        what = f".metadata of {tensors * chunks:,} chunks of {tensors:,} tensors"
        for ours, theirs in ((OPEN, LOADS), (WRITE, DUMPS)):
            taken, other = median(seconds[ours]), median(seconds[theirs])
            times = ratio(seconds, ours, theirs)
            found.append(Bar(f"{what}: {ours}", theirs, taken, other, times, MOST_OF_PICKLE))
    return found


def stored_chunks(tensors: int, chunks: int) -> WrittenContents:
    """Return what a `.metadata` says of so many tensors of so many chunks each."""
    row = np.arange(tensors * chunks)
    files = tuple(f"__{number}_0.distcp" for number in range(_FILES))
    length = np.full(row.size, 1024)
    return WrittenContents(row_shards(tensors, chunks), files, row % _FILES, row // _FILES * 1024, length, {})


def _opened(place: Path, tensors: int) -> st.checkpoint.OpenCheckpoint:
    tree = st.open_checkpoint(place)
    if len(tree) != tensors:
        raise ValueError(f"{len(tree)} tensors where {tensors} were written")
    return tree


def _unpickled(place: Path) -> object:
    return pickle.loads((place / ".metadata").read_bytes())


def model_bars(settings: Settings, folder: Path) -> list[Bar]:
    """Return the bar of opening a Hugging Face model of very many tensors in many files, which have no content."""
    tensors, files = (40, 4) if settings.quick else MODEL
    write_model(folder, tensors, files)
    rounds, tries = (1, 1) if settings.quick else (5, 3)
    taken = median(in_turns({OPEN: partial(_opened, folder, tensors)}, rounds=rounds, tries=tries)[OPEN])
    what = f"a Hugging Face model of {tensors:,} tensors in {files} files: open"
    return [Bar(what, "", taken, None, taken, MOST_SECONDS)]


def write_model(folder: Path, tensors: int, files: int) -> None:
    """Write a Hugging Face model of so many tensors, in files that are holes."""
    weight_map: dict[str, str] = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        keys = [f"model.layers.{number}.experts.{expert}.weight" for expert in range(tensors // files)]
        size = 128 * 64 * 2
        header = encode_header(
            [HeaderEntry(key, "BF16", (128, 64), at * size, (at + 1) * size) for at, key in enumerate(keys)]
        )
        with (folder / name).open("wb") as file:
            file.write(header)
            file.truncate(len(header) + len(keys) * size)
        weight_map |= dict.fromkeys(keys, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


MOST_OF_RAW, MOST_OF_DCP = 2.0, 0.01
MOST_MICROSECONDS = {None: 25.0, "whole": 100.0}
"""Of 64 KiB of rows, by what is checked: what raw reads take there is as much the machine's as the file's."""

CUTS = 64
ROWS, COLUMNS = 65_536, 4_096  # of float32: 1 GiB

RAW, DCP = "raw preadv into a new tensor", "DCP"
UNCHECKED, CHECKED = "verify=None", "default"
NATIVE = "our format"
VERIFY: dict[str, Verify] = {UNCHECKED: None, CHECKED: "whole"}

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
        reads: dict[str, ReadRows] = {RAW: raw, **{name: partial(_block, lazy, rows) for name, lazy in opened.items()}}
        for read in reads.values():
            _check_elements(read(7), tensor[7 : 7 + rows])
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
    number, rows = CUTS // 3, tensor.shape[0] // CUTS
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
            _check_elements(action(), expected)
        seconds = in_turns(actions, rounds=rounds, tries=tries)
    return [_load_row(seconds, name) for name in actions if name != DCP]


def _load_row(seconds: Seconds, name: str) -> Bar:
    most = MOST_OF_DCP if name.endswith(UNCHECKED) else None  # DCP checks nothing either
    what = f"load 1/{CUTS} of the rows of 1 GiB saved whole, {name}"
    return Bar(what, DCP, median(seconds[name]), median(seconds[DCP]), ratio(seconds, name, DCP), most)


@contextmanager
def _one_of_many(rank: int, local: torch.Tensor) -> Iterator[DTensor]:
    """Give the DTensor of one of 64 ranks, of which there are no others: the group does nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=CUTS)
    try:
        mesh = init_device_mesh("cpu", (CUTS,))
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


def _load(folder: Path, target: torch.Tensor, number: int, verify: Verify) -> torch.Tensor:
    shard = st.ShardedTensor.from_rank_offsets("w", target, (0, number, CUTS))
    # The other ranks' rows are nobody's here, so that shards don't tile the tensor.
    options, only_mine = st.LoadOptions(verify=verify), one_process()
    loaded = st.load(
        {"w": shard}, folder, donate=True, validate_access_integrity=False, options=options, world=only_mine
    )
    return cast(torch.Tensor, loaded["w"])


def _check_elements(found: torch.Tensor, expected: torch.Tensor) -> None:
    # As integers: among these floats are some that don't equal themselves.
    if not torch.equal(found.view(torch.int32), expected.view(torch.int32)):
        raise ValueError("not the elements that were saved")


PARTS = {
    "Names, shapes and dtypes": key_bars,
    "Millions of chunks": chunk_bars,
    "Other formats' metadata": metadata_bars,
    "A Hugging Face model": model_bars,
    "Little of a large tensor": large_bars,
}


def bars(settings: Settings) -> list[Bar]:
    """Return all bars of opening, a table printed for each kind."""
    found = []
    for title, measure in PARTS.items():
        with tempfile.TemporaryDirectory(dir=settings.folder, prefix="shardtree-benchmark-") as folder:
            rows = measure(settings, Path(folder))
        print_bars(title, rows, settings.console)
        found += rows
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns 0, whatever the figures, unless ``--strict`` is given and a bar is missed."""
    return run(bars, arguments, "benchmarks.opening", __doc__)


if __name__ == "__main__":
    sys.exit(main())

"""Who saves and loads what: raw system calls, shardtree, and its peers with their default and their best settings."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar, cast

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors import safe_open
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import shardtree as st
from shardtree.interop.dcp import CheckpointReader, CheckpointWriter
from shardtree.shell.storage import Verify

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One rank's part of the job.

    Attributes:
        rank: of this process.
        ranks: how many processes there are.
        folder: where contenders put their files; all ranks see it.
        rows: this rank's row shard of each tensor, (rows / ranks, columns).
        targets: memory like `rows`.
        columns: memory for this rank's column shard of each tensor, (rows, columns / ranks).
    """

    rank: int
    ranks: int
    folder: Path
    rows: Tensors
    targets: Tensors
    columns: Tensors

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of all ranks."""
        return self.ranks * sum(tensor.nbytes for tensor in self.rows.values())


def work(rank: int, ranks: int, folder: Path, *, size: int, tensors: int) -> Work:
    """Return a rank's work, every page of it touched.

    Args:
        rank: of this process.
        ranks: how many processes there are.
        folder: where contenders put their files.
        size: of all tensors together, in bytes; about kept.
        tensors: how many there are, by turns float32 and bfloat16, equally many bytes each.
    """
    return _work(rank, ranks, folder, [size // tensors] * tensors)


def mixed_work(rank: int, ranks: int, folder: Path, *, size: int, tensors: int) -> Work:
    """Return a rank's work of tensors of 1 KiB to `size` bytes each, all sizes alike; the rest as in `work`."""
    sizes = [1024 + number * 2654435761 % max(1, size - 1023) for number in range(tensors)]
    return _work(rank, ranks, folder, sizes)


def _work(rank: int, ranks: int, folder: Path, sizes: list[int]) -> Work:
    shapes = {f"layers.{number}.weight": _shape(size, _dtype(number), ranks) for number, size in enumerate(sizes)}
    kinds = {name: (_dtype(number), *shape) for number, (name, shape) in enumerate(shapes.items())}
    return Work(
        rank=rank,
        ranks=ranks,
        folder=folder,
        rows={name: _random(dtype, rows // ranks, columns, rank) for name, (dtype, rows, columns) in kinds.items()},
        targets={
            name: torch.zeros(rows // ranks, columns, dtype=dtype) for name, (dtype, rows, columns) in kinds.items()
        },
        columns={
            name: torch.zeros(rows, columns // ranks, dtype=dtype) for name, (dtype, rows, columns) in kinds.items()
        },
    )


def column_shard(mine: Work, rows: Tensors) -> Tensors:
    """Return this rank's columns of a piece of some rows, as views."""
    return {name: tensor.chunk(mine.ranks, 1)[mine.rank] for name, tensor in rows.items()}


def _dtype(number: int) -> torch.dtype:
    return torch.bfloat16 if number % 2 else torch.float32


def _shape(size: int, dtype: torch.dtype, ranks: int) -> tuple[int, int]:
    """Return (rows, columns), both multiples of the number of ranks, of about `size` bytes."""
    elements = max(1, size // dtype.itemsize)
    columns = min(2048, 1 << (elements.bit_length() // 2)) // ranks * ranks or ranks
    return max(1, elements // columns // ranks) * ranks, columns


def _random(dtype: torch.dtype, rows: int, columns: int, rank: int) -> torch.Tensor:
    """Return numbers of chance: what repeats itself would be compressed by who does that."""
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(rank)).to(dtype)


SAVE, LOAD, LOAD_NEW, LOAD_COLUMNS = "save", "load into given tensors", "load new tensors", "load resharded"
HASH = "hash"

RAW, OURS, OURS_UNCHECKED = "raw pwrite, preadv", "shardtree", "shardtree, no checksums"
DCP, DCP_BEST, SAFETENSORS = "DCP", "DCP, 2 threads", "safetensors"
TORCH, TORCH_MAPPED = "torch.save", "torch.load(mmap=True)"
PLUG = "shardtree, by DCP's calls"

QUICK = st.SaveOptions(durable=False)

STEP = 1024 * 1024
"""Bytes of a raw read or write, as large as those of shardtree."""

BLOCK = 256 * 1024
"""Bytes that are hashed at a time, as by shardtree."""

Part = TypeVar("Part")

Load = Callable[[Work, Path], Tensors]


@dataclass(frozen=True, slots=True, eq=False)
class Contender:
    """One way of saving, and what can be measured on its files.

    Attributes:
        name: of its row for saving.
        save: writes this rank's part into an empty folder.
        loads: by operation and name of the row: fills or makes this rank's tensors and returns them.
        tidy_up: done before each load, outside of its time.
    """

    name: str
    save: Callable[[Work, Path], None]
    loads: Mapping[tuple[str, str], Load]
    tidy_up: Callable[[], None] = lambda: None


def contenders(ranks: int) -> tuple[Contender, ...]:
    """Return everybody who takes part with that many processes."""
    everybody = (
        Contender(RAW, raw_saving(hashes=False), _raw_loads()),
        Contender(OURS_UNCHECKED, saving(checksums=False), {}),
        Contender(OURS, saving(), {**loading(OURS, "whole"), **loading(OURS_UNCHECKED, None)}),
        dcp_contender(DCP, {"sync_files": False}),
        dcp_contender(DCP_BEST, {"sync_files": False, "thread_count": 2}),
        dcp_contender(
            PLUG, {"options": st.SaveOptions(durable=False)}, writer=CheckpointWriter, reader=CheckpointReader
        ),
        Contender(SAFETENSORS, safetensors_save, copying(SAFETENSORS, safetensors_tensors, safetensors_columns)),
        Contender(
            TORCH,
            _torch_save,
            copying(TORCH, partial(_torch_tensors, mmap=False), partial(_torch_columns, mmap=False))
            | copying(TORCH_MAPPED, partial(_torch_tensors, mmap=True), partial(_torch_columns, mmap=True)),
        ),
    )
    return everybody if ranks > 1 else tuple(map(without_columns, everybody))


def everybody(ranks: int) -> tuple[Contender, ...]:
    """Return all contenders, and the peers that are installed and can take part with that many processes."""
    return (*contenders(ranks), *orbax_contenders(ranks))


def without_columns(one: Contender) -> Contender:
    loads = {place: load for place, load in one.loads.items() if place[0] != LOAD_COLUMNS}
    return replace(one, loads=loads)


# Raw: the tensors' bytes one after the other, a file for each thread: two that write one file wait for each other.


def _raw_loads() -> dict[tuple[str, str], Load]:
    loads = {LOAD: raw_loading(hashes=False), LOAD_NEW: _raw_new, LOAD_COLUMNS: _raw_columns, HASH: _hash}
    return {(operation, RAW): load for operation, load in loads.items()}


def raw_saving(*, hashes: bool) -> Callable[[Work, Path], None]:
    """Return a loop that writes 1 MiB at a time, and hashes it right before, so that it lies in the cache then."""

    def write(path: Path, parts: Sequence[tuple[int, memoryview]]) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.posix_fallocate(descriptor, 0, sum(len(part) for _, part in parts))
        for byte, part in parts:
            if hashes:
                _hash_blocks(part)
            os.pwrite(descriptor, part, byte)
        os.close(descriptor)

    def save(mine: Work, folder: Path) -> None:
        files = _raw_files(mine.rows)
        paths = [folder / f"{mine.rank}-{number}.raw" for number in range(len(files))]
        with ThreadPoolExecutor(len(files)) as pool:
            list(pool.map(write, paths, files))

    return save


def _hash_blocks(part: memoryview) -> None:
    for start in range(0, len(part), BLOCK):
        xxhash.xxh3_64_intdigest(part[start : start + BLOCK])


def _raw_files(tensors: Tensors) -> list[list[tuple[int, memoryview]]]:
    """Return the parts of each file, and where in it each begins."""
    parts = list(_parts(tensors))
    each = -(-len(parts) // torch.get_num_threads())
    files = [parts[start : start + each] for start in range(0, len(parts), each)]
    return [[(byte - file[0][0], part) for byte, part in file] for file in files]


def raw_loading(*, hashes: bool) -> Load:
    """Return a loop that reads 1 MiB at a time, and hashes it while it is in the cache."""
    return lambda mine, folder: _raw_read(mine, folder, mine.targets, hashes=hashes)


def _raw_new(mine: Work, folder: Path) -> Tensors:
    return _raw_read(mine, folder, _new(mine.rows), hashes=False)


def _raw_columns(mine: Work, folder: Path) -> Tensors:
    """Read as many bytes, one after the other: what a reshard would cost if it were no reshard."""
    _raw_read(mine, folder, mine.columns, hashes=False)
    return {}


def raw_hashing(mine: Work, folder: Path) -> None:
    """Read what `raw_saving` wrote into one buffer a thread, and hash it there."""
    rooms = cycle(memoryview(bytearray(STEP)) for _ in range(torch.get_num_threads()))
    # Threads take parts in turns, so that each has a buffer of its own.
    into = [[(byte, next(rooms)[: len(part)]) for byte, part in file] for file in _raw_files(mine.rows)]
    _read_files(mine, folder, into, hashes=True)


def _raw_read(mine: Work, folder: Path, tensors: Tensors, *, hashes: bool) -> Tensors:
    _read_files(mine, folder, _raw_files(tensors), hashes=hashes)
    return tensors


def _read_files(mine: Work, folder: Path, files: list[list[tuple[int, memoryview]]], *, hashes: bool) -> None:
    descriptors = [os.open(folder / f"{mine.rank}-{number}.raw", os.O_RDONLY) for number in range(len(files))]

    def read(parts: Sequence[tuple[int, int, memoryview]]) -> None:
        for descriptor, byte, part in parts:
            os.preadv(descriptor, [part], byte)
            if hashes:
                _hash_blocks(part)

    _in_threads(read, [(each, *part) for each, file in zip(descriptors, files, strict=True) for part in file])
    for descriptor in descriptors:
        os.close(descriptor)


def _hash(mine: Work, folder: Path) -> Tensors:
    """Hash what lies in memory, as a load does in the block size of our format."""

    def hash_parts(parts: Sequence[tuple[int, memoryview]]) -> None:
        for _, part in parts:
            _hash_blocks(part)

    _in_threads(hash_parts, list(_parts(mine.rows)))
    return {}


def _in_threads(work: Callable[[Sequence[Part]], None], parts: Sequence[Part]) -> None:
    """Work in as many threads as shardtree does, each on every so-manieth part."""
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, (parts[first::threads] for first in range(threads))))


def _parts(tensors: Tensors) -> Iterator[tuple[int, memoryview]]:
    byte = 0
    for tensor in tensors.values():
        view = memoryview(tensor.view(-1).view(torch.uint8).numpy())
        for start in range(0, len(view), STEP):
            part = view[start : start + STEP]
            yield byte, part
            byte += len(part)


def _new(tensors: Tensors) -> Tensors:
    return {name: torch.empty_like(tensor) for name, tensor in tensors.items()}


# shardtree. Trees are made once, before anything is timed, as the dicts of tensors are that other libraries take.


def saving(strategy: tuple[str, int] | None = None, *, checksums: bool = True) -> Callable[[Work, Path], None]:
    """Return what saves a rank's rows."""
    rows = cache(row_tree)

    def save(mine: Work, folder: Path) -> None:
        st.save(rows(mine), folder, strategy, options=st.SaveOptions(durable=False, checksums=checksums))

    return save


def loading(name: str, verify: Verify) -> dict[tuple[str, str], Load]:
    """Return what loads into given tensors, into new ones, and columns, under the name of a row."""

    @cache
    def tree(mine: Work, operation: str) -> Mapping[str, st.ShardedTensor]:
        targets = _tree(mine, mine.targets, axis=0)
        return {
            LOAD: targets,
            LOAD_NEW: st.without_data(targets),
            LOAD_COLUMNS: _tree(mine, mine.columns, axis=1),
        }[operation]

    def load(mine: Work, folder: Path, *, operation: str) -> Tensors:
        targets, options = tree(mine, operation), st.LoadOptions(verify=verify)
        return cast(Tensors, st.load(targets, folder, donate=operation != LOAD_NEW, options=options))

    return {(operation, name): partial(load, operation=operation) for operation in (LOAD, LOAD_NEW, LOAD_COLUMNS)}


def row_tree(mine: Work) -> dict[str, st.ShardedTensor]:
    """Return the tree of what a rank saves."""
    return _tree(mine, mine.rows, axis=0)


def _tree(mine: Work, tensors: Tensors, *, axis: int) -> dict[str, st.ShardedTensor]:
    place = (axis, mine.rank, mine.ranks)
    return {name: st.ShardedTensor.from_rank_offsets(name, tensor, place) for name, tensor in tensors.items()}


# torch.distributed.checkpoint, without fsync as everybody else here. Its DTensors are made once, too. It has no load
# into new tensors of its own.


def dcp_contender(
    name: str,
    settings: Mapping[str, Any],
    *,
    kept_plans: bool = False,
    writer: Callable[..., Any] = dcp.FileSystemWriter,
    reader: Callable[..., Any] = dcp.FileSystemReader,
) -> Contender:
    @cache
    def tree(mine: Work, operation: str) -> Tensors:
        held, axis = {SAVE: (mine.rows, 0), LOAD: (mine.targets, 0), LOAD_COLUMNS: (mine.columns, 1)}[operation]
        return distributed(mine, held, axis)

    def save(mine: Work, folder: Path) -> None:
        planner = DefaultSavePlanner(enable_plan_caching=kept_plans)
        with _quiet():
            dcp.save(
                tree(mine, SAVE), storage_writer=writer(folder, **settings), planner=planner, no_dist=mine.ranks == 1
            )

    def fill(mine: Work, folder: Path, filled: Tensors) -> None:
        with _quiet():
            dcp.load(filled, storage_reader=reader(folder), no_dist=mine.ranks == 1)

    def given(mine: Work, folder: Path) -> Tensors:
        fill(mine, folder, tree(mine, LOAD))
        return mine.targets

    def new(mine: Work, folder: Path) -> Tensors:
        tensors = _new(mine.targets)
        fill(mine, folder, distributed(mine, tensors, 0))
        return tensors

    def columns(mine: Work, folder: Path) -> Tensors:
        fill(mine, folder, tree(mine, LOAD_COLUMNS))
        return mine.columns

    return Contender(name, save, {(LOAD, name): given, (LOAD_NEW, name): new, (LOAD_COLUMNS, name): columns})


def distributed(mine: Work, tensors: Tensors, axis: int) -> Tensors:
    """Return a rank's tensors as DTensors that are sharded along an axis; as they are where there is one rank."""
    if mine.ranks == 1:
        return tensors
    mesh = _mesh(mine.ranks)
    return {name: DTensor.from_local(tensor, mesh, [Shard(axis)], run_check=False) for name, tensor in tensors.items()}


@cache
def _mesh(ranks: int) -> DeviceMesh:
    return DeviceMesh("cpu", list(range(ranks)))


def _quiet() -> warnings.catch_warnings:
    return warnings.catch_warnings(action="ignore")


# Peers that keep one file a rank and hand out mapped tensors. A mapped tensor is read when it is first touched, so the
# copy into memory of its own is part of loading it.


def copying(name: str, whole: Load, columns: Callable[[Work, Path], Iterator[Tensors]]) -> dict[tuple[str, str], Load]:
    def given(mine: Work, folder: Path) -> Tensors:
        for key, tensor in whole(mine, folder).items():
            mine.targets[key].copy_(tensor)
        return mine.targets

    def new(mine: Work, folder: Path) -> Tensors:
        loaded = whole(mine, folder)
        return loaded if name == TORCH else {key: tensor.clone() for key, tensor in loaded.items()}

    def resharded(mine: Work, folder: Path) -> Tensors:
        for rank, part in enumerate(columns(mine, folder)):
            for key, tensor in part.items():
                mine.columns[key].chunk(mine.ranks, 0)[rank].copy_(tensor)
        return mine.columns

    return {(LOAD, name): given, (LOAD_NEW, name): new, (LOAD_COLUMNS, name): resharded}


def safetensors_save(mine: Work, folder: Path) -> None:
    safetensors.torch.save_file(mine.rows, folder / f"{mine.rank}.safetensors")


def safetensors_tensors(mine: Work, folder: Path) -> Tensors:
    with safe_open(folder / f"{mine.rank}.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in mine.rows}


def safetensors_columns(mine: Work, folder: Path) -> Iterator[Tensors]:
    for rank in range(mine.ranks):
        with safe_open(folder / f"{rank}.safetensors", "pt") as file:
            yield column_shard(mine, {name: file.get_tensor(name) for name in mine.rows})


def _torch_save(mine: Work, folder: Path) -> None:
    torch.save(mine.rows, folder / f"{mine.rank}.pt")


def _torch_tensors(mine: Work, folder: Path, *, mmap: bool) -> Tensors:
    return cast(Tensors, torch.load(folder / f"{mine.rank}.pt", mmap=mmap, weights_only=True))


def _torch_columns(mine: Work, folder: Path, *, mmap: bool) -> Iterator[Tensors]:
    for rank in range(mine.ranks):
        yield column_shard(mine, torch.load(folder / f"{rank}.pt", mmap=mmap, weights_only=True))


DEFAULT, BEST = "Orbax", "Orbax, tuned"
PEER_NAMES = (DEFAULT, BEST)
PEER_TERMS = {
    DEFAULT: "StandardCheckpointer; compresses, so it writes fewer bytes of regular data; told not to sync",
    BEST: "its version 1 API, no compression, no copy before saving; told not to sync",
}
ONE_PROCESS = "Orbax joins processes by jax.distributed alone: measured in one process"


def missing_peers(ranks: int) -> str:
    """Return why there is no row with that many processes; empty where there is one."""
    if not find_spec("orbax"):
        return "not installed: pip install -c constraints.txt -e '.[benchmarks]'"
    return ONE_PROCESS if ranks > 1 else ""


def orbax_contenders(ranks: int) -> tuple[Contender, ...]:
    """Return both rows, or none where `missing_peers` says why."""
    if missing_peers(ranks):
        return ()
    return _contender(DEFAULT, _save, _load), _contender(BEST, _tuned_save, _tuned_load)


def _contender(name: str, save: Callable[[Any, Path], None], load: Callable[[Any, Path], Any]) -> Contender:
    def given(mine: Work, folder: Path) -> Tensors:
        for key, tensor in new(mine, folder).items():
            mine.targets[key].copy_(tensor)
        return mine.targets

    def new(mine: Work, folder: Path) -> Tensors:
        return _tensors(load(_arrays(mine.rows), _path(folder)), mine.rows)

    def saved(mine: Work, folder: Path) -> None:
        save(_arrays(mine.rows), _path(folder))

    return Contender(name, saved, {(LOAD, name): given, (LOAD_NEW, name): new}, _trim)


def _trim() -> None:
    """Give the system back what was freed: a third of what was loaded stays in the heaps of Orbax's threads."""
    ctypes.CDLL(None).malloc_trim(0)


def _path(folder: Path) -> Path:
    return folder / "orbax"  # it must not be there yet


def _save(arrays: Any, path: Path) -> None:
    checkpointer = _checkpointer()
    checkpointer.save(path, arrays)
    checkpointer.wait_until_finished()


def _load(like: Any, path: Path) -> Any:
    return _checkpointer().restore(path, like)


def _tuned_save(arrays: Any, path: Path) -> None:
    with _context():
        _version_one().save(path, arrays)


def _tuned_load(like: Any, path: Path) -> Any:
    with _context():
        return _version_one().load(path, like)


@cache
def _checkpointer() -> Any:
    _told_not_to_sync()
    import orbax.checkpoint

    return orbax.checkpoint.StandardCheckpointer()


@cache
def _version_one() -> Any:
    _told_not_to_sync()
    import orbax.checkpoint.experimental.v1

    return orbax.checkpoint.experimental.v1


def _context() -> Any:
    context = _version_one().Context()
    context.array.saving.use_compression = False
    context.memory.deepcopy_host_arrays = False
    return context


def _told_not_to_sync() -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from orbax.checkpoint._src.serialization import tensorstore_utils

    for context in (tensorstore_utils._BASE_TS_CONTEXT, tensorstore_utils._DEFAULT_OCDBT_TS_CONTEXT):
        context["file_io_sync"] = False


# bfloat16 is known to torch and to ml_dtypes, but not to NumPy: it goes over as its bits.


def _arrays(tensors: Tensors) -> dict[str, Any]:
    import ml_dtypes

    return {
        name: tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        if tensor.dtype == torch.bfloat16
        else tensor.numpy()
        for name, tensor in tensors.items()
    }


def _tensors(arrays: dict[str, Any], like: Tensors) -> Tensors:
    return {name: _tensor(array, like[name].dtype) for name, array in arrays.items()}


def _tensor(array: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(array.view("int16")).view(dtype) if dtype == torch.bfloat16 else torch.from_numpy(array)

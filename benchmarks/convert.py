"""Conversions, by one process and by two, and of a model of 1.37 TB: ``python -m benchmarks.convert``.

They go into a sink that hashes what it is given and drops zeros. First float32 becomes bfloat16 there. The others are
compared with the same bytes read by hand into the same sink: first 1 GB from Hugging Face to torch_dist. Then
DeepSeek-V3, whose files are sparse, cut for TP 8, PP 16 and EP 64: opening, planning, and the first bytes of the stream
of all, with nothing in the page cache; there and back, with all that reads it back, of its first layer and its last;
and there and back of as many tensors as it has, in as many batches, of a 256th of the bytes. Last, 10 GB of real
float32 tensors become bfloat16, beside safetensors and torch by hand, and what came out is compared bit for bit.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import shardtree as st
from shardtree.conversion._journal import journal_of
from shardtree.conversion._plan import Plan, plan_conversion
from shardtree.live import run_processes
from shardtree.storage import LocalStorage, MemoryStorage

from ._deepseek import SMALL, THIN, TRAINING, Config, make_folder, nbytes_of, shapes_of
from ._measuring import Action, Bar, Settings, peak, print_bars, run

STEPS = (1024 * 1024, 64 * 1024, 4096)
"""Bytes that are hashed at once; those in which something isn't zero, again in smaller steps."""


@dataclass(frozen=True, slots=True)
class SparseFolder(LocalStorage):
    """A folder whose files have holes where they are zeros, which their hashes tell.

    Examples:
        >>> import tempfile
        >>> folder = SparseFolder(tempfile.mkdtemp())
        >>> folder.write("a", [memoryview(bytes(2**30)), memoryview(b"end")], durable=False)
        1073741827
        >>> os.stat(folder.where("a")).st_blocks * 512 < 2**20
        True
    """

    def write(self, name: str, buffers: Iterable[Any], *, durable: bool) -> int:
        """Write a new file from buffers, in order, and return its length."""
        length = 0
        with open(self.where(name), "wb", buffering=0) as file:
            for buffer in buffers:
                _write_hashed(file.fileno(), length, memoryview(buffer).cast("B"))
                length += memoryview(buffer).nbytes
            file.truncate(length)
        return length

    def write_parts(self, name: str, length: int, parts: Iterable[tuple[int, Any]], *, durable: bool) -> None:
        """Write parts of a file of `length` bytes."""
        descriptor = os.open(self.where(name), os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            os.ftruncate(descriptor, length)
            for byte, buffer in parts:
                _write_hashed(descriptor, byte, memoryview(buffer).cast("B"))
        finally:
            os.close(descriptor)


def _write_hashed(descriptor: int, byte: int, buffer: memoryview, steps: tuple[int, ...] = STEPS) -> None:
    for start in range(0, buffer.nbytes, steps[0]):
        part = buffer[start : start + steps[0]]
        if xxhash.xxh3_64_intdigest(part) == _hash_of_zeros(part.nbytes):
            continue
        if steps[1:]:
            _write_hashed(descriptor, byte + start, part, steps[1:])
        else:
            os.pwrite(descriptor, part, byte + start)


@cache
def _hash_of_zeros(nbytes: int) -> int:
    return xxhash.xxh3_64_intdigest(bytes(nbytes))


MIB = 1024 * 1024
BATCH = 256 * MIB  # as by default
WINDOW = 16 * MIB  # of the plain copy
TO, BACK = ("torch_dist", 1), ("huggingface", 1)
ENDS = Config(layers=1, dense_layers=1)  # a layer, and the one that predicts two tokens ahead
MOST_MIB = 2048.0
FAST: dict[str, Any] = {"verify": False, "save_options": st.SaveOptions(durable=False)}


def bars(settings: Settings) -> list[Bar]:
    """Return the bars of processes, of the sink, and of the large model."""
    size, part, rounds = (4 * MIB, 256 * 1024, 1) if settings.quick else (2**30, 4 * 2**30, 3)
    with tempfile.TemporaryDirectory(dir=settings.folder, prefix="shardtree-convert-") as where:
        folder = Path(where)
        found = [_two_processes(folder, 12 * size, rounds), _beside_a_copy(folder, size, rounds)]
        found += _large_model(folder, SMALL if settings.quick else Config(), part, rounds)
        trips = [(SMALL, BATCH // 2**15)] if settings.quick else [(ENDS, BATCH), (THIN, BATCH // 256)]
        found += [bar for config, most in trips for bar in _there_and_back(folder, config, most)]
        found += _beside_scripts(folder, 16 * MIB if settings.quick else 10 * 10**9, rounds)
    print_bars("Conversions", found, settings.console)
    return found


def _compared(
    operation: str, beside: str, jobs: tuple[Callable[[], float], Callable[[], float]], rounds: int, most: float
) -> Bar:
    """Return the bar of two jobs that return their seconds, in alternating rounds after one that warms them up."""
    ours, other = jobs
    ours(), other()
    pairs = [(ours(), other()) for _ in range(rounds)]
    seconds = [median(column) for column in zip(*pairs, strict=True)]
    return Bar(operation, beside, seconds[0], seconds[1], median(one / two for one, two in pairs), most)


# Processes.


def _two_processes(folder: Path, size: int, rounds: int) -> Bar:
    """Return the bar of two processes beside one, into the sink, since one disk or its cache takes no more of two."""
    source, rows = folder / "float32", max(1, size // 256 // 4096)
    zeros = torch.zeros(1, 1024).expand(rows, 1024)  # what is saved may be as much as there is memory
    shards = [st.ShardedTensor.from_rank_offsets(f"w{n}", zeros) for n in range(256)]
    st.save(shards, source, options=st.SaveOptions(durable=False))
    jobs = partial(_seconds_of_processes, 2, source, size), partial(_seconds_of_processes, 1, source, size)
    found = _compared(f"float32 to bfloat16, {size / 1e9:.2g} GB, 2 processes", "1 process", jobs, rounds, 1 / 1.7)
    shutil.rmtree(source)
    return found


def _seconds_of_processes(processes: int, source: Path, size: int) -> float:
    with _sink(source.parent) as sink:
        return max(run_processes(processes, partial(_halved, source, sink, size)))


def _halved(source: Path, sink: SparseFolder, size: int, world: st.World) -> float:
    torch.set_num_threads(1)  # as torchrun sets it
    half = st.bind(st.cast, torch.bfloat16)
    st.open_checkpoint(source)  # imports what it needs
    world.barrier()
    begin = time.perf_counter()
    most = max(1, size // 64)
    st.convert(source, sink, backend=TO, transform=half, max_bytes_in_flight=most, world=world, **FAST)
    world.barrier()
    return time.perf_counter() - begin


# A sink, and a plain copy into it.


class Enough(BaseException):
    """So much was streamed that the rest would take as long for each byte."""


def _beside_a_copy(folder: Path, size: int, rounds: int) -> Bar:
    source, rows = folder / "bfloat16", max(1, size // 16 // 2048)
    shards = [
        st.ShardedTensor.from_rank_offsets(f"w{n}", torch.zeros(rows, 1024, dtype=torch.bfloat16)) for n in range(16)
    ]
    st.save(shards, source, sharded_strategy=BACK, common_strategy=BACK, options=st.SaveOptions(durable=False))
    jobs = (partial(_stream, source, size), partial(copy_seconds, source, size))
    found = _compared(f"huggingface to torch_dist, {size / 1e9:.2g} GB", "a copy by hand", jobs, rounds, 1 / 0.9)
    shutil.rmtree(source)
    return found


def _stream(source: Path, most: int, layout: Mapping[str, tuple[int, ...]] | None = None) -> float:
    """Return the seconds that the first bytes of a conversion took, without planning it."""
    begin, done = 0.0, 0

    def count(nbytes: int) -> None:
        nonlocal begin, done
        begin = begin or time.perf_counter()  # the first MiB of so many isn't counted
        done += nbytes
        if done >= most:
            raise Enough

    with _sink(source.parent) as sink:
        options = {**FAST, "save_options": st.SaveOptions(durable=False, progress=count)}
        with suppress(Enough):
            st.convert(source, sink, backend=TO, layout=layout, leave_out=["common"], **options)
        return time.perf_counter() - begin


@contextmanager
def _sink(folder: Path) -> Iterator[SparseFolder]:
    with tempfile.TemporaryDirectory(dir=folder, prefix="sink-") as where:
        yield SparseFolder(where)


def copy_seconds(source: Path, most: int) -> float:
    """Return the seconds that reading the same bytes by hand into the same sink takes."""
    with _sink(source.parent) as sink:
        begin = time.perf_counter()
        sink.write("copy.distcp", _windows(source, most), durable=False)
        return time.perf_counter() - begin


def _windows(source: Path, most: int) -> Iterator[memoryview]:
    window = memoryview(bytearray(WINDOW))
    for path in sorted(source.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while most > 0 and (count := os.preadv(file.fileno(), [window[: min(most, WINDOW)]], file.tell())):
                file.seek(count, os.SEEK_CUR)
                most -= count
                yield window[:count]


# A large model.


def _large_model(folder: Path, config: Config, part: int, rounds: int) -> list[Bar]:
    shapes = shapes_of(config)
    source, tiny = folder / "model", folder / "tiny"
    make_folder(source, shapes, 163 if config is not SMALL else 3)
    make_folder(tiny, shapes_of(SMALL), 3)
    of = f"{len(shapes):,} tensors, {nbytes_of(shapes) / 1e12:.3g} TB"
    opened, plan, seconds = _planned(source)
    amount = f"{len(plan.batches):,} batches"
    memory = peak(partial(_begun, tiny, source, min(part, 2**30)), folder).own / MIB
    # More than a memory holds comes from the medium, and so do these parts of it.
    jobs = (
        partial(_cold, partial(_stream, layout=TRAINING), source, part),
        partial(_cold, copy_seconds, source, part),
    )
    return [
        Bar(f"{of}: open", "", opened, None, opened, None),
        Bar(f"{of}: plan, to torch_dist", "", seconds, None, seconds, None, note=amount),
        Bar(f"{of}: memory of all that", "", memory, None, memory, MOST_MIB, "MiB"),
        _compared(f"{of}: stream {part / 1e9:.2g} GB of it", "a copy by hand", jobs, rounds, 1 / 0.9),
    ]


def _cold(job: Callable[[Path, int], float], source: Path, part: int) -> float:
    """Return the seconds of a job on files of which nothing is in the page cache."""
    for path in source.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return job(source, part)


def _planned(source: Path) -> tuple[float, Plan, float]:
    """Return the seconds of opening, a plan, and the seconds of planning."""
    begin = time.perf_counter()
    opened = st.open_checkpoint(source)
    len(opened.metadata)
    middle = time.perf_counter()
    options: dict[str, Any] = {"leave_out": ["common"], "plain": [], "prune": False}
    plan = plan_conversion(opened, None, None, layout=TRAINING, most_bytes=BATCH, **options)
    where = (MemoryStorage(), opened.checkpoint, (TO, TO), plan.batches, None)
    journal_of(*where, common={}, nonce="", allow_pickle=False)
    return middle - begin, plan, time.perf_counter() - middle


def _begun(tiny: Path, source: Path, part: int, rank: int, ranks: int) -> Action:
    """Convert a tiny model, and get ready to begin with the large one."""
    _stream(tiny, 2**40)

    def action() -> int:
        _stream(source, part, TRAINING)
        return 0

    return action


def _there_and_back(folder: Path, config: Config, most: int) -> list[Bar]:
    """Return the bars of two whole conversions, each with reading back and comparing, in a process of their own."""
    shapes, source = shapes_of(config), folder / "trip"
    of = f"{len(shapes):,} tensors, {nbytes_of(shapes) / 1e9:.3g} GB"
    make_folder(source, shapes, 3)
    memory = peak(partial(_trips, source, folder, most), folder).own / MIB
    seconds = [float(line) for line in (folder / "seconds").read_text().split()]
    shutil.rmtree(source)
    return [
        Bar(f"{of}: to torch_dist, compared", "", seconds[0], None, seconds[0], None),
        Bar(f"{of}: back, the same fingerprints", "", seconds[1], None, seconds[1], None),
        Bar(f"{of}: memory of both", "", memory, None, memory, MOST_MIB, "MiB"),
    ]


def _trips(source: Path, folder: Path, most: int, rank: int, ranks: int) -> Action:
    def action() -> int:
        begin = time.perf_counter()
        options: dict[str, Any] = {"max_bytes_in_flight": most, "save_options": st.SaveOptions(durable=False)}
        with _sink(folder) as first, _sink(folder) as second:
            there = st.convert(source, first, backend=TO, layout=TRAINING, leave_out=["common"], **options)
            middle = time.perf_counter()
            back = st.convert(first, second, backend=BACK, **options)
            if there.fingerprints != back.fingerprints or len(back.fingerprints) != back.tensors:
                raise ValueError("what came back isn't what was sent")
            (folder / "seconds").write_text(f"{middle - begin} {time.perf_counter() - middle}")
        return 0

    return action


# Scripts by hand.

FILE_TENSORS = 4


def _beside_scripts(folder: Path, size: int, rounds: int) -> list[Bar]:
    """Return the seconds and the memory of the same conversion by us and by hand."""
    source = folder / "weights"
    source.mkdir()
    _write_weights(source, size)
    seconds: dict[str, list[float]] = {name: [] for name in SCRIPTS}
    memory = dict.fromkeys(SCRIPTS, 0.0)
    for _ in range(rounds):
        for name, script in SCRIPTS.items():
            shutil.rmtree(folder / name, ignore_errors=True)
            # What was written before isn't waited for in between, and nobody is the first to read the source.
            os.sync()
            for _ in _windows(source, sys.maxsize):
                pass
            job = partial(_script, script, source, folder / name, folder / "seconds")
            memory[name] = max(memory[name], peak(job, folder).own / MIB)
            seconds[name].append(float((folder / "seconds").read_text()))
    _check_equal(folder / "convert", folder / "safetensors")
    for name in ("weights", *SCRIPTS):
        shutil.rmtree(folder / name)
    what, bars = f"float32 to bfloat16, huggingface, {size / 1e9:.3g} GB", []
    for ours, *others in (("convert", "safetensors", "torch"), ("convert, not read back", "safetensors", "torch")):
        for other in others:
            taken, its = median(seconds[ours]), median(seconds[other])
            pairs = zip(seconds[ours], seconds[other], strict=True)
            bars += [
                Bar(f"{what}: {ours}", other, taken, its, median(one / two for one, two in pairs), None),
                Bar(f"{what}: {ours}", other, memory[ours], memory[other], memory[ours] / memory[other], None, "MiB"),
            ]
    return bars


def _write_weights(folder: Path, size: int) -> None:
    """Write tensors of which no two are equal, four to a file of up to 512 MB."""
    files = -(-size // (512 * 10**6))
    rows = size // files // FILE_TENSORS // 4 // 4096
    tensor = torch.randn(rows, 4096)
    placed: dict[str, str] = {}
    for number in range(files):
        tensors = {f"layers.{number}.{each}": tensor + number + each / 8 for each in range(FILE_TENSORS)}
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        save_file(tensors, folder / name)
        placed |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": files * FILE_TENSORS * tensor.nbytes}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _convert(source: Path, destination: Path) -> None:
    options = st.SaveOptions(durable=False)
    st.convert(source, destination, backend=BACK, transform=st.bind(st.cast, torch.bfloat16), save_options=options)


def _convert_unread(source: Path, destination: Path) -> None:
    st.convert(source, destination, backend=BACK, transform=st.bind(st.cast, torch.bfloat16), **FAST)


def _by_safetensors(source: Path, destination: Path) -> None:
    destination.mkdir()
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key).to(torch.bfloat16) for key in file.keys()}  # noqa: SIM118
        save_file(tensors, destination / path.name)


def _by_torch(source: Path, destination: Path) -> None:
    destination.mkdir()
    tensors = {key: each for path in sorted(source.glob("*.safetensors")) for key, each in load_file(path).items()}
    torch.save({key: each.to(torch.bfloat16) for key, each in tensors.items()}, destination / "model.pt")


SCRIPTS = {
    "convert": _convert,
    "convert, not read back": _convert_unread,
    "safetensors": _by_safetensors,
    "torch": _by_torch,
}
"""The first two are ours; all but the first don't read back what they have written."""


def _script(
    script: Callable[[Path, Path], None], source: Path, destination: Path, seconds: Path, rank: int, ranks: int
) -> Action:
    def action() -> int:
        begin = time.perf_counter()
        script(source, destination)
        seconds.write_text(f"{time.perf_counter() - begin}")
        return 0

    return action


def _check_equal(ours: Path, theirs: Path) -> None:
    tree = st.open_checkpoint(ours)
    for path in sorted(theirs.glob("*.safetensors")):
        for key, tensor in load_file(path).items():
            if not torch.equal(tree[key].data.read().view(torch.int16), tensor.view(torch.int16)):
                raise ValueError(f"{key} isn't what safetensors makes of it")


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns 0 unless ``--strict`` is given and a bar is missed."""
    return run(bars, arguments, "benchmarks.convert", __doc__)


if __name__ == "__main__":
    sys.exit(main())

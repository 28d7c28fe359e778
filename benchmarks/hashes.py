"""What hashes and fingerprints cost: ``python -m benchmarks.hashes --size 1GB``.

First the hash alone over the tensors' bytes in memory, a save (which always hashes), loads with and without their
check, and `verify` of the whole checkpoint by one thread and by two, beside a plain read of its files. Then each
tensor's fingerprint, of a quarter of the size, beside a copy of the same bytes into warm memory and their XXH3, with
one thread and with two; a save to files with and without ``fingerprint=True``, one of replicas with and without
``check_replicas=True``, and the fingerprint of the checkpoint. Nobody waits for the medium, and files are in the page
cache. Rounds alternate, and a number is their median. The last column counts the seconds of all threads on processors,
which others on the machine change least.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median

import torch
import xxhash
from rich.console import Console
from rich.table import Table

import shardtree as st
from shardtree.shell.storage import block_hashes

from ._contenders import STEP
from .roundtrip import _bytes

ALONE, SAVE, LOAD, LOAD_UNCHECKED, READ = "XXH3-64 alone, in memory", "save", "load", "load, verify=None", "plain read"
VERIFY = ("verify, 1 thread", "verify, 2 threads")
FORMATS = (("safetensors", 1), ("torch_dist", 1))


def _checks(options: argparse.Namespace, console: Console) -> None:
    count = max(1, options.size // options.tensors // 4)
    tensors = {f"layers.{number}": torch.arange(count, dtype=torch.int32) for number in range(options.tensors)}
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    title = f"{nbytes / 1e9:.3g} GB in {options.tensors} tensors, medians of {options.rounds} rounds"
    drawn = Table(title=title, title_justify="left")
    for heading in ("format", "what", "seconds", "GB/s", "share of a save", "share of a load", "times a plain read"):
        drawn.add_column(heading, justify="left" if heading in ("format", "what") else "right")
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="shardtree-benchmark-") as folder:
        for backend in FORMATS:
            _add_rows(drawn, backend[0], nbytes, _medians(tensors, Path(folder), backend, options.rounds))
            drawn.add_section()
    console.print(drawn)


def _medians(tensors: dict[str, torch.Tensor], folder: Path, backend: tuple[str, int], rounds: int) -> dict[str, float]:
    """Return the median of the rounds' seconds, by what was done; one round more, which doesn't count, warms up."""
    targets = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        place = folder / f"{backend[0]}-{number}"
        for what, action in _actions(tensors, targets, place, backend).items():
            start = time.perf_counter()
            action()
            if number:
                found.setdefault(what, []).append(time.perf_counter() - start)
        for path in sorted(place.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    return {what: median(seconds) for what, seconds in found.items()}


def _actions(
    tensors: dict[str, torch.Tensor], targets: dict[str, torch.Tensor], place: Path, backend: tuple[str, int]
) -> dict[str, Callable[[], object]]:
    given = {name: st.ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in tensors.items()}
    wanted = {name: st.ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in targets.items()}
    load = partial(st.load, wanted, place, donate=True)
    return {
        ALONE: lambda: block_hashes(memoryview(tensor.view(torch.uint8).numpy()) for tensor in tensors.values()),
        SAVE: partial(st.save, given, place, backend, options=st.SaveOptions(durable=False)),
        READ: lambda: _read(place),
        LOAD: load,
        LOAD_UNCHECKED: partial(load, options=st.LoadOptions(verify=None)),
        VERIFY[0]: partial(_verify, place, 1),
        VERIFY[1]: partial(_verify, place, 2),
    }


def _verify(place: Path, threads: int) -> None:
    damage = st.verify(place, options=st.LoadOptions(threads=threads), report=lambda _: None)
    if damage:
        raise ValueError(f"a sound checkpoint was found damaged: {damage[0]}")


def _read(place: Path) -> None:
    room = memoryview(bytearray(STEP))
    for path in _files(place):
        descriptor = os.open(path, os.O_RDONLY)
        while os.readv(descriptor, [room]):
            pass
        os.close(descriptor)


def _files(place: Path) -> Iterator[Path]:
    return (path for path in sorted(place.rglob("*")) if path.is_file())


def _add_rows(drawn: Table, name: str, nbytes: int, seconds: dict[str, float]) -> None:
    for number, (what, taken) in enumerate(seconds.items()):
        hashed = what == ALONE and name == "safetensors"
        of_save = f"{taken / seconds[SAVE]:.2f}" if hashed else ""
        of_load = f"{taken / seconds[LOAD]:.2f}" if hashed else ""
        if what == LOAD_UNCHECKED:
            of_load = f"{taken / seconds[LOAD]:.2f}"
        of_read = f"{taken / seconds[READ]:.2f}" if what in VERIFY else ""
        drawn.add_row(
            "" if number else name, what, f"{taken:.3f}", f"{nbytes / taken / 1e9:.2f}", of_save, of_load, of_read
        )


Job = tuple[str, str, int, Callable[[], object]]
"""What is done to what, its bytes, and the function that does it."""

KINDS = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64)
SUM, COPY, HASH = "fingerprint", "memcpy", "XXH3"


def _fingerprints(options: argparse.Namespace, console: Console) -> None:
    usual = torch.get_num_threads()
    for threads in options.threads:
        torch.set_num_threads(threads)
        with tempfile.TemporaryDirectory(dir=options.dir, prefix="shardtree-benchmark-") as folder:
            jobs = [*_in_memory(options.size // 4), *_on_files(options.size // 4, Path(folder))]
            seconds = _measure(jobs, options.rounds)
        console.print(_table(f"{threads} thread{'s' * (threads > 1)}", jobs, seconds))
    torch.set_num_threads(usual)


def _in_memory(size: int) -> list[Job]:
    jobs: list[Job] = []
    for name, tensor in _tensors(size).items():
        bits = tensor.contiguous().view(-1).view(torch.uint8)
        target = torch.zeros_like(bits)
        shards = [st.ShardedTensor.from_rank_offsets("w", tensor)]
        jobs += [
            (SUM, name, bits.nbytes, partial(st.fingerprint, shards)),
            (COPY, name, bits.nbytes, partial(target.copy_, bits)),
            (HASH, name, bits.nbytes, partial(xxhash.xxh3_64_intdigest, bits.numpy())),
        ]
    return jobs


def _tensors(size: int) -> dict[str, torch.Tensor]:
    """Return tensors of equally many bytes, by what is particular to them."""
    rows = {kind: max(1, size // kind.itemsize // 4096) for kind in KINDS}
    found = {f"{str(kind)[6:]}, rows of 4096": _random(kind, rows[kind], 4096) for kind in KINDS}
    plain = found["float32, rows of 4096"]
    return found | {
        "float32, one axis": plain.flatten(),
        "float32, rows of 8": plain.view(-1, 8),
        "float32, transposed": plain.T,
    }


def _random(kind: torch.dtype, *shape: int) -> torch.Tensor:
    elements = torch.Size(shape).numel()
    return torch.randint(0, 256, (elements * kind.itemsize,), dtype=torch.uint8).view(kind).view(shape)


def _on_files(size: int, folder: Path) -> list[Job]:
    kinds = enumerate([torch.float32, torch.bfloat16] * 4)
    layers = {f"layers.{number}": _random(kind, size // kind.itemsize // 8192, 1024) for number, kind in kinds}
    shards = [st.ShardedTensor.from_rank_offsets(key, layer) for key, layer in layers.items()]
    nbytes, kept = sum(shard.data.nbytes for shard in shards), folder / "kept"
    st.save(shards, kept, options=st.SaveOptions(durable=False, fingerprint=True))

    def save(*, fingerprint: bool) -> None:
        st.save(shards, folder / "new", options=st.SaveOptions(durable=False, fingerprint=fingerprint))
        shutil.rmtree(folder / "new")

    def save_copies(*, check_replicas: bool) -> None:
        """Save from two ranks that hold the same, so that each looks at all that it holds."""

        def save_rank(world: st.World) -> None:
            tree = [replace(shard, replica_id=world.rank) for shard in shards]
            st.save(
                tree,
                folder / "copies",
                world=world,
                options=st.SaveOptions(durable=False, check_replicas=check_replicas),
            )

        st.simulate(2, save_rank)
        shutil.rmtree(folder / "copies")

    return [
        ("save of two ranks' replicas", "files", nbytes, partial(save_copies, check_replicas=False)),
        ("the same, check_replicas=True", "files", nbytes, partial(save_copies, check_replicas=True)),
        ("save", "files", nbytes, partial(save, fingerprint=False)),
        ("save, fingerprint=True", "files", nbytes, partial(save, fingerprint=True)),
        ("fingerprint", "files", nbytes, partial(st.fingerprint, kept)),
        ("verify", "files", nbytes, partial(st.verify, kept)),
    ]


def _measure(jobs: list[Job], rounds: int) -> list[tuple[float, float]]:
    """Return each job's medians over rounds, on the clock and on processors; one round before them warms up."""
    taken: list[list[tuple[float, float]]] = [[] for _ in jobs]
    for turn in range(rounds + 1):
        for number in Random(turn).sample(range(len(jobs)), len(jobs)):
            begin, begin_busy = time.perf_counter(), time.process_time()
            jobs[number][-1]()
            now, busy = time.perf_counter() - begin, time.process_time() - begin_busy
            taken[number] += [(now, busy)] if turn else []
    return [(median(now for now, _ in each), median(busy for _, busy in each)) for each in taken]


def _table(title: str, jobs: list[Job], seconds: list[tuple[float, float]]) -> Table:
    drawn = Table(title=title, title_justify="left")
    for heading in ("of", "what", "seconds", "GB/s", "GB/s of processors"):
        drawn.add_column(heading, justify="left" if heading in ("of", "what") else "right")
    for (what, of, nbytes, _), (taken, busy) in zip(jobs, seconds, strict=True):
        drawn.add_row(of, what, f"{taken:.4f}", f"{nbytes / taken / 1e9:.2f}", f"{nbytes / busy / 1e9:.2f}")
    return drawn


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark, print a table for the checks and one for each number of threads, and return 0."""
    options = _parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)
    _checks(options, console)
    _fingerprints(options, console)
    return 0


def _parser() -> argparse.ArgumentParser:
    asked = argparse.ArgumentParser(prog="python -m benchmarks.hashes", description=__doc__)
    asked.add_argument("--size", type=_bytes, default=_bytes("1GB"), help="of all tensors together, such as 2GB")
    asked.add_argument("--tensors", type=int, default=20, help="how many are saved and verified")
    asked.add_argument("--rounds", type=int, default=5, help="that count; one more warms up")
    asked.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], help="of fingerprints, a table for each number"
    )
    asked.add_argument("--dir", type=Path, help="a folder on the storage to measure; the system's temporary one")
    return asked


if __name__ == "__main__":
    sys.exit(main())

"""The speed of fingerprints: ``python -m benchmarks.fingerprint --size 256MB``.

Each tensor's fingerprint beside a copy of the same bytes into warm memory and their XXH3, with one thread and with two;
then a save to files with and without ``fingerprint=True``, one of replicas with and without ``check_replicas=True``,
and the fingerprint of the checkpoint. In each round everybody has a turn, in another order. Nobody waits for the
medium, and files are in the page cache. The last column counts the seconds of all threads on processors, which others
on the machine change least.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
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

from .roundtrip import _bytes

Job = tuple[str, str, int, Callable[[], object]]
"""What is done to what, its bytes, and the function that does it."""

KINDS = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64)
SUM, COPY, HASH = "fingerprint", "memcpy", "XXH3"


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and print a table for each number of threads; returns 0."""
    options = _parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 110)
    usual = torch.get_num_threads()
    for threads in options.threads:
        torch.set_num_threads(threads)
        with tempfile.TemporaryDirectory(dir=options.dir, prefix="shardtree-benchmark-") as folder:
            jobs = [*_in_memory(options.size), *_on_files(options.size, Path(folder))]
            seconds = _measure(jobs, options.rounds)
        console.print(_table(f"{threads} thread{'s' * (threads > 1)}", jobs, seconds))
    torch.set_num_threads(usual)
    return 0


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fingerprint", description=__doc__)
    parser.add_argument("--size", type=_bytes, default=_bytes("256MB"), help="of each tensor, and of each save")
    parser.add_argument("--rounds", type=int, default=5, help="that count; one more warms up")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="one table for each number")
    parser.add_argument("--dir", type=Path, help="a folder on the storage to measure; the system's temporary one")
    return parser


if __name__ == "__main__":
    sys.exit(main())

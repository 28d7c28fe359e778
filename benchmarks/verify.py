"""What hashes cost: ``python -m benchmarks.verify --size 1GB``.

One table: the hash and the CRC alone over the tensors' bytes in memory, a save (which always hashes), loads with and
without their check, and `verify` of the whole checkpoint by one thread and by two, beside a plain read of its files.
Nobody waits for the medium, and files are in the page cache. Rounds alternate; a number is the median of them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

import shardtree as st
from shardtree.storage import block_hashes

from ._contenders import STEP
from .roundtrip import _bytes

HASH, SAVE, LOAD, LOAD_UNCHECKED, READ = "XXH3-64 alone, in memory", "save", "load", "load, verify=None", "plain read"
VERIFY = ("verify, 1 thread", "verify, 2 threads")
FORMATS = (("safetensors", 1), ("torch_dist", 1))


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and print its table; returns 0."""
    options = _parser().parse_args(arguments)
    count = max(1, options.size // options.tensors // 4)
    tensors = {f"layers.{number}": torch.arange(count, dtype=torch.int32) for number in range(options.tensors)}
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    title = f"{nbytes / 1e9:.3g} GB in {options.tensors} tensors, medians of {options.rounds} rounds"
    drawn = Table(title=title, title_justify="left")
    for heading in ("format", "what", "seconds", "GB/s", "share of a save", "share of a load", "times a plain read"):
        drawn.add_column(heading, justify="left" if heading in ("format", "what") else "right")
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="shardtree-benchmark-") as folder:
        for backend in FORMATS:
            _add_rows(drawn, backend[0], nbytes, _measured(tensors, Path(folder), backend, options.rounds))
            drawn.add_section()
    Console(width=None if sys.stdout.isatty() else 120).print(drawn)
    return 0


def _measured(
    tensors: dict[str, torch.Tensor], folder: Path, backend: tuple[str, int], rounds: int
) -> dict[str, float]:
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
        HASH: lambda: block_hashes(memoryview(tensor.view(torch.uint8).numpy()) for tensor in tensors.values()),
        SAVE: partial(st.save, given, place, backend, options=st.SaveOptions(durable=False)),
        READ: lambda: _read(place),
        LOAD: load,
        LOAD_UNCHECKED: partial(load, verify=None),
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
        hashed = what == HASH and name == "safetensors"
        of_save = f"{taken / seconds[SAVE]:.2f}" if hashed else ""
        of_load = f"{taken / seconds[LOAD]:.2f}" if hashed else ""
        if what == LOAD_UNCHECKED:
            of_load = f"{taken / seconds[LOAD]:.2f}"
        of_read = f"{taken / seconds[READ]:.2f}" if what in VERIFY else ""
        drawn.add_row(
            "" if number else name, what, f"{taken:.3f}", f"{nbytes / taken / 1e9:.2f}", of_save, of_load, of_read
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verify", description=__doc__)
    parser.add_argument("--size", type=_bytes, default=_bytes("1GB"), help="of all tensors together, such as 2GB")
    parser.add_argument("--tensors", type=int, default=20, help="how many there are")
    parser.add_argument("--rounds", type=int, default=5, help="that count; one more warms up")
    parser.add_argument("--dir", type=Path, help="a folder on the storage to measure; the system's temporary one")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""Checkpoints in an object store, beside raw obstore and others: ``python -m benchmarks.remote``.

The store is an S3 server in memory, a process of its own on loopback, which answers after 5, 50 or 200 ms, or at once
with 20 MB a second on each connection. Everybody moves the same bytes; rounds alternate, and medians count. Requests
are counted by the server, and those one after the other are its longest chain of requests of which each began after the
last ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import torch
import xxhash

import shardtree as st
from shardtree.stores import object_storage

from ._measuring import Bar, Settings, peak, print_bars, run

MIB = 2**20
URL = "s3://bucket/benchmark"
PART = 8 * MIB
BLOCK = 256 * 1024  # of our hashes
LINKS = {
    "5 ms": (0.005, None),
    "50 ms": (0.05, None),
    "200 ms": (0.2, None),
    "20 MB/s a connection": (0.0, 20e6),
}


class Server:
    """The server's process, told what to do by lines."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.s3.server"]
        root = Path(__file__).parents[1]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
        self.url = self._answer()

    def tell(self, latency: float, bandwidth: float | None) -> None:
        """Set the latency, in seconds, and what a connection carries, in bytes a second."""
        for line in (f"latency {latency}", f"bandwidth {bandwidth}"):
            self._ask(line)

    def requests(self) -> tuple[int, int, int]:
        """Return how many requests there were since the last call, their bytes, and how many one after the other."""
        count, nbytes, in_a_row = map(int, self._ask("requests").split())
        return count, nbytes, in_a_row

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def end(self) -> None:
        """Stop it."""
        with self._process:  # closes its lines, upon which it ends, and waits for that
            pass


@contextmanager
def serving() -> Iterator[Server]:
    """Run the server, and let the environment name it."""
    server = Server()
    named = {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "benchmark",
        "AWS_SECRET_ACCESS_KEY": "benchmark",
        "AWS_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in named}
    os.environ |= named
    try:
        yield server
    finally:
        server.end()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def tree(tensors: int, nbytes: int, *, fill: float | None = 1.0) -> dict[str, Any]:
    """Return row-major matrices of float32, together of so many bytes."""
    rows = max(2, nbytes // tensors // (4 * 1024))
    new = torch.empty if fill is None else partial(torch.full, fill_value=fill)
    return {
        f"w{number}": st.ShardedTensor.from_rank_offsets(f"w{number}", new((rows, 1024))) for number in range(tensors)
    }


def bars(settings: Settings) -> list[Bar]:
    """Return what is asked of checkpoints in object stores."""
    if find_spec("obstore") is None:
        settings.console.print("remote: needs obstore; pip install 'shardtree[remote]'")
        return []
    tensors, nbytes = (4, 4 * MIB) if settings.quick else (100, 256 * MIB)
    rounds = 1 if settings.quick else 7
    with serving() as server:
        found = [
            *_speeds(server, tensors, nbytes, rounds),
            *_counts(server, tensors, nbytes),
            *_memory(settings, tensors, nbytes),
        ]
    title = f"Object store on loopback, {nbytes // MIB} MiB in {tensors} tensors, medians of {rounds} rounds"
    print_bars(title, found, settings.console)
    return found


def _speeds(server: Server, tensors: int, nbytes: int, rounds: int) -> Iterator[Bar]:
    whole, target = tree(tensors, nbytes), tree(tensors, nbytes, fill=0.0)
    st.save(whole, URL, overwrite=True)
    memory = {
        name.rpartition("/")[2]: np.zeros(entry.length, dtype=np.uint8) for name, entry in _data_entries().items()
    }
    ours: dict[str, Callable[[], object]] = {
        "save": lambda: st.save(whole, URL, overwrite=True),
        "load, checked": lambda: st.load(target, URL, donate=True),
    }
    raw: dict[str, Callable[[], object]] = {
        "save": partial(_raw_put, [shard.data for shard in whole.values()]),
        "load, checked": _raw_get,
    }
    # The least that each can do. A checked load gets, hashes, and copies to where the tensors are. A save has four
    # requests beside the tensors, each of which waits for the one before.
    least: dict[tuple[str, str], tuple[str, Callable[[], object]]] = {
        ("load, checked", "50 ms"): ("raw, hashed and copied", partial(_raw_get, partial(_hash_and_copy, memory))),
        ("save", "50 ms"): ("raw, with 4 small requests", partial(_raw_save_with_small_requests, raw["save"])),
    }
    limits = {("save", "50 ms"): 1.3, ("load, checked", "50 ms"): 1.2}
    for link, (latency, bandwidth) in LINKS.items():
        for operation, own in ours.items():
            beside, bound = least.get((operation, link), ("", None))
            jobs = [own, raw[operation], *([bound] if bound else [])]
            server.tell(0.0, None)
            for job in jobs:
                job()  # warms connections and memory
            server.tell(latency, bandwidth)
            times = [[_seconds(job) for job in jobs] for _ in range(rounds)]
            mine, *others = (median(column) for column in zip(*times, strict=True))
            figures = [median(row[0] / row[at] for row in times) for at in range(1, len(jobs))]
            most = limits.get((operation, link))
            yield Bar(f"{operation}, {link}", "raw obstore", mine, others[0], figures[0], most)
            if bound:
                note = f"which takes {median(row[2] / row[1] for row in times):.2f} times raw"
                yield Bar(f"{operation}, {link}", beside, mine, others[1], figures[1], most, note=note)
        if link == "50 ms":
            yield from _columns(server, tensors, nbytes, rounds)
            yield from _peers(whole, target, rounds)
    server.tell(0.0, None)


def _columns(server: Server, tensors: int, nbytes: int, rounds: int) -> Iterator[Bar]:
    rows = max(2, nbytes // tensors // (4 * 1024))

    def load(world: Any) -> None:
        wanted = {
            f"w{number}": st.ShardedTensor.from_rank_offsets(f"w{number}", torch.zeros(rows, 512), (1, world.rank, 2))
            for number in range(tensors)
        }
        st.load(wanted, URL, world=world)

    st.simulate(2, load)
    server.requests()
    seconds = median(_seconds(lambda: st.simulate(2, load)) for _ in range(rounds))
    count, fetched, _ = server.requests()
    note = f"{count // rounds} requests, {fetched // rounds / 1e6:.0f} MB fetched"
    yield Bar("columns of saved rows, 2 ranks, 50 ms", "", seconds, None, seconds, 1.2, note=note)


def _peers(whole: dict[str, Any], target: dict[str, Any], rounds: int) -> Iterator[Bar]:
    plain = {key: shard.data for key, shard in whole.items()}
    contenders = {
        "zarr-python, obstore": ("zarr", _zarr),
        "s3fs, cat_file": ("s3fs", _s3fs),
        "DCP, s3fs": ("s3fs", _dcp),
    }
    for name, (package, prepare) in contenders.items():
        if find_spec(package) is None:
            missing = float("nan")
            yield Bar("load, checked, 50 ms", name, missing, None, missing, None, note=f"pip install {package}")
            continue
        other = prepare(plain)
        other()
        pairs = [(_seconds(lambda: st.load(target, URL, donate=True)), _seconds(other)) for _ in range(rounds)]
        mine, its = (median(times) for times in zip(*pairs, strict=True))
        yield Bar("load, checked, 50 ms", name, mine, its, median(one / two for one, two in pairs), None)


def _zarr(plain: dict[str, torch.Tensor]) -> Callable[[], object]:
    """Return a load of arrays of one chunk each, uncompressed and unchecked."""
    import zarr
    from zarr.storage import ObjectStore

    store = ObjectStore(object_storage(f"{URL}-zarr").store)  # type: ignore[attr-defined]
    group = zarr.create_group(store, path="benchmark-zarr", overwrite=True)
    for key, tensor in plain.items():
        array = group.create_array(key, shape=tensor.shape, dtype="float32", chunks=tensor.shape, compressors=None)
        array[:] = tensor.numpy()
    return lambda: [cast(Any, group[key])[:] for key in plain]


def _s3fs(plain: dict[str, torch.Tensor]) -> Callable[[], object]:
    """Return a fetch of our own files, whole and unchecked."""
    from s3fs import S3FileSystem

    files = S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"], use_listings_cache=False)
    return lambda: [files.cat_file(name) for name in files.find(URL) if "-of-00001" in name]


def _dcp(plain: dict[str, torch.Tensor]) -> Callable[[], object]:
    """Return a load of what DCP has saved itself, unchecked."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    dcp.save(plain, storage_writer=FsspecWriter(f"{URL}-dcp", sync_files=False), no_dist=True)
    filled = {key: torch.zeros_like(value) for key, value in plain.items()}
    return lambda: dcp.load(filled, storage_reader=FsspecReader(f"{URL}-dcp"), no_dist=True)


def _data_entries() -> dict[str, Any]:
    return {name: entry for name, entry in object_storage(URL).entries().items() if "-of-00001" in name}  # type: ignore[attr-defined]


def _raw_put(tensors: Sequence[torch.Tensor]) -> None:
    import obstore

    # Two files, as our save writes with two threads, in parts as obstore makes them unless told otherwise.
    store = object_storage(URL).store  # type: ignore[attr-defined]
    half = -(-len(tensors) // 2)

    def put(number: int) -> None:
        own = tensors[number * half : (number + 1) * half]
        parts = (memoryview(each.numpy()).cast("B") for each in own)
        obstore.put(store, f"raw/{number}", parts)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(put, range(2)))


def _raw_save_with_small_requests(raw_save: Callable[[], object]) -> None:
    """Save raw, then make the requests of a save that wait for one another: the note, index, commit and a removal."""
    import obstore

    raw_save()
    store = object_storage(URL).store  # type: ignore[attr-defined]
    for name in ("note", "index", "commit"):
        obstore.put(store, f"raw/{name}", b"x" * 200)
    obstore.delete(store, "raw/note")


def _raw_get(use: Callable[[str, int, Any], None] = lambda *_: None, in_flight: int = 16) -> None:
    """Get our data files in parts, and do something with each."""
    import obstore

    store = object_storage(URL).store  # type: ignore[attr-defined]
    spans = [
        (name, begin, min(begin + PART, entry.length))
        for name, entry in _data_entries().items()
        for begin in range(0, entry.length, PART)
    ]

    def get(span: tuple[str, int, int]) -> None:
        name, begin, end = span
        use(name.rpartition("/")[2], begin, obstore.get_range(store, f"benchmark/{name}", start=begin, end=end))

    with ThreadPoolExecutor(in_flight) as threads:
        list(threads.map(get, spans))


def _hash_and_copy(memory: dict[str, Any], name: str, begin: int, data: Any) -> None:
    part = np.frombuffer(data, dtype=np.uint8)
    for at in range(0, part.size, BLOCK):
        xxhash.xxh3_64_intdigest(part[at : at + BLOCK])
    memory[name][begin : begin + part.size] = part


def _counts(server: Server, tensors: int, nbytes: int) -> Iterator[Bar]:
    target, small = tree(tensors, nbytes, fill=0.0), tree(1, 4096)
    st.save(small, f"{URL}-small", overwrite=True)
    series = st.CheckpointSeries(f"{URL}-series")
    for step in range(5):
        series.save(small, step)
    server.tell(0.2, None)  # so that requests which are in flight together are seen to be
    server.requests()
    st.load(target, URL, donate=True)
    count, fetched, in_a_row = server.requests()
    files = len({name for name in object_storage(URL).entries() if name.endswith("safetensors")})  # type: ignore[attr-defined]
    yield Bar("requests of a load", "", count, None, count, fetched / PART + files + 4, "")
    yield Bar("requests of a load, one after the other", "", in_a_row, None, in_a_row, 3, "")
    jobs: list[tuple[str, Callable[[], object], float, float | None]] = [
        ("open", lambda: st.open_checkpoint(URL), 2, 2),
        ("small save to a new folder", lambda: st.save(small, f"{URL}-new-{time.monotonic_ns()}"), 12, 6),
        ("small overwrite", lambda: st.save(small, f"{URL}-small", overwrite=True), 8, 5),
        ("overwrite", lambda: st.save(target, URL, overwrite=True), 8 + 3 * files + nbytes / PART, 7),
        ("series: one save", lambda: series.save(small, 5), 18, None),
        ("series: latest of 5", series.latest, 7, None),
    ]
    for name, job, most, most_in_a_row in jobs:
        server.requests()
        job()
        count, _, in_a_row = server.requests()
        yield Bar(f"requests: {name}", "", count, None, count, most, "")
        if most_in_a_row is not None:
            yield Bar(f"requests: {name}, one after the other", "", in_a_row, None, in_a_row, most_in_a_row, "")
    server.tell(0.0, None)
    st.convert(URL, f"{URL}-converted-{time.monotonic_ns()}", backend="huggingface")
    count, *_ = server.requests()
    yield Bar("requests: convert to huggingface", "", count, None, count, 2 * nbytes / PART + 5 * files, "")


def _memory(settings: Settings, tensors: int, nbytes: int) -> Iterator[Bar]:
    with tempfile.TemporaryDirectory(dir=settings.folder) as folder:
        for name, prepare, most in (("save", prepare_save, 128.0), ("load", prepare_load, 256.0 + 64)):
            found = peak(partial(prepare, tensors, nbytes), Path(folder)).own / MIB
            yield Bar(f"extra memory of a {name}", "", found, None, found, most, "MiB")


def prepare_save(tensors: int, nbytes: int, rank: int, ranks: int) -> Callable[[], int]:
    """Return what a new process does to measure the memory of a save."""
    whole = tree(tensors, nbytes)
    st.save(tree(1, 4096), f"{URL}-warm", overwrite=True)

    def save() -> int:
        st.save(whole, URL, overwrite=True)
        return 0

    return save


def prepare_load(tensors: int, nbytes: int, rank: int, ranks: int) -> Callable[[], int]:
    """Return what a new process does to measure the memory of a load into memory that is there."""
    target = tree(tensors, nbytes, fill=0.0)
    st.load(tree(1, 4096, fill=0.0), f"{URL}-warm", donate=True)

    def load() -> int:
        st.load(target, URL, donate=True)
        return 0

    return load


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


if __name__ == "__main__":
    sys.exit(run(bars, None, "benchmarks.remote", __doc__))

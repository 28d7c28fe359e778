"""What whole models need, on an object store: ``python -m benchmarks.remote_scale``; no bars.

The server is that of `benchmarks.remote`, which counts requests and bytes. Measured once each, after one that warms up
connections and imports: a conversion by one process and by two, a load by ranks that all want the same, a Hugging Face
folder into halves, opening a model of very many tensors and a `.metadata` of very many chunks, a verification, and one
small read of an open checkpoint.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import shardtree as st
from shardtree.storage import object_storage
from shardtree.strategies.torch_dist._metadata_write import encode_index_file
from shardtree.world import run_processes

from ._bars import Bar, Settings, print_bars, run
from ._opening_formats import MODEL, stored_chunks, write_model
from .remote import MIB, URL, Server, serving, tree

MODEL_URL, METADATA_URL, FOLDER_URL = f"{URL}-model", f"{URL}-metadata", f"{URL}-huggingface"
LATENCY = 0.05  # seconds
RANKS = 2


def bars(settings: Settings) -> list[Bar]:
    """Return the figures."""
    tensors, nbytes = (4, 4 * MIB) if settings.quick else (100, 100 * 656 * 4096)  # of 656 rows, which two ranks halve
    with serving() as server, tempfile.TemporaryDirectory(dir=settings.folder) as folder:
        _prepare(Path(folder), tensors, nbytes, quick=settings.quick)
        found = [
            *_conversions(server),
            _same_on_all(server, tensors, nbytes),
            _halves(server, tensors, nbytes),
            _measured(server, "open a Hugging Face model of very many tensors", partial(_opened, MODEL_URL)),
            _measured(server, "open a .metadata of very many chunks", partial(_opened, METADATA_URL)),
            _measured(server, f"verify {nbytes // MIB} MiB", partial(st.verify, URL)),
            _small_read(server),
        ]
    print_bars(f"Whole models on an object store, {LATENCY * 1000:g} ms a request", found, settings.console)
    return found


def _prepare(folder: Path, tensors: int, nbytes: int, *, quick: bool) -> None:
    whole = tree(tensors, nbytes)
    st.save(whole, URL, overwrite=True)
    huggingface = ("huggingface", 1)
    st.save(whole, FOLDER_URL, overwrite=True, sharded_strategy=huggingface, common_strategy=huggingface)
    write_model(folder, *((40, 4) if quick else MODEL))
    store = object_storage(MODEL_URL)
    for path in folder.iterdir():
        store.write(path.name, [path.read_bytes()], durable=False)
    stored = stored_chunks(20, 5) if quick else stored_chunks(1_000, 100)
    metadata = encode_index_file(stored, "save", None, {key: (key,) for key in stored.columns.keys})
    object_storage(METADATA_URL).write(".metadata", [metadata], durable=False)


def _measured(server: Server, what: str, job: Callable[[], object]) -> Bar:
    server.tell(0.0, None)
    job()
    server.tell(LATENCY, None)
    server.requests()
    begin = time.perf_counter()
    said = job()
    seconds = time.perf_counter() - begin
    count, fetched, in_a_row = server.requests()
    note = f"{count} requests, {in_a_row} in a row, {fetched / 1e6:.1f} MB fetched"
    return Bar(what, "", seconds, None, seconds, None, note=f"{note}. {said}" if isinstance(said, str) else note)


def _conversions(server: Server) -> list[Bar]:
    return [
        _measured(server, f"convert Hugging Face to torch_dist, {ranks} process(es)", partial(_converted, ranks))
        for ranks in (1, RANKS)
    ]


def _converted(ranks: int) -> str:
    place = f"{URL}-converted-{time.monotonic_ns()}"
    seconds = max(run_processes(ranks, partial(_convert, place)))
    return f"without starting processes {seconds:.2f} s"


def _convert(place: str, world: st.World) -> float:
    st.open_checkpoint(FOLDER_URL)
    world.barrier()
    begin = time.perf_counter()
    st.convert(FOLDER_URL, place, backend="torch_dist", max_bytes_in_flight=32 * MIB, world=world)
    return time.perf_counter() - begin


def _same_on_all(server: Server, tensors: int, nbytes: int) -> Bar:
    what = f"{RANKS} processes load the same {nbytes // MIB} MiB"
    return _measured(server, what, partial(_loaded_by_all, tensors, nbytes))


def _loaded_by_all(tensors: int, nbytes: int) -> str:
    return run_processes(RANKS, partial(_load_the_same, tensors, nbytes))[0]


def _load_the_same(tensors: int, nbytes: int, world: st.World) -> str:
    wanted = {
        key: st.ShardedTensor.from_rank_offsets(key, shard.data, replica_id=world.rank)
        for key, shard in tree(tensors, nbytes, fill=0.0).items()
    }
    begin = time.perf_counter()
    report = _load(wanted, URL, world)
    return f"without starting processes {time.perf_counter() - begin:.2f} s. {report.exchange}"


def _load(wanted: Any, place: str, world: st.World) -> Any:
    reports: list[Any] = []
    st.load(wanted, place, world=world, donate=True, options=st.LoadOptions(report=reports.append, exchange="always"))
    return reports[0]


def _halves(server: Server, tensors: int, nbytes: int) -> Bar:
    what = f"{RANKS} processes load halves of {nbytes // MIB} MiB from a Hugging Face folder"
    return _measured(server, what, partial(_loaded_halves, tensors, nbytes))


def _loaded_halves(tensors: int, nbytes: int) -> str:
    read = run_processes(RANKS, partial(_load_half, tensors, nbytes))
    return f"read by each: {', '.join(f'{each / 1e6:.0f} MB' for each in read)}"


def _load_half(tensors: int, nbytes: int, world: st.World) -> int:
    wanted = {
        key: st.ShardedTensor.from_rank_offsets(
            key, torch.zeros(shard.data.shape[0] // RANKS, 1024), (0, world.rank, RANKS)
        )
        for key, shard in tree(tensors, nbytes, fill=None).items()
    }
    return int(_load(wanted, FOLDER_URL, world).bytes_read)


def _opened(place: str) -> str:
    return f"{len(st.open_checkpoint(place)):,} tensors"


def _small_read(server: Server) -> Bar:
    data = st.open_checkpoint(URL)["w0"].data
    return _measured(server, "read 64 KiB of rows of an open checkpoint", lambda: data[:16].read())


if __name__ == "__main__":
    sys.exit(run(bars, None, "benchmarks.remote_scale", __doc__))

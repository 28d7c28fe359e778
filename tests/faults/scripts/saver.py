"""A warm process that forks a process a rank for each request on its input, under strace if asked to.

One JSON object a line: a request in, how each rank ended out. A fork of a process that has imported everything takes
a hundredth of the time that a new one does, so that a save can be killed at each of its calls in turn.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import dying
import torch
import torch.distributed as dist

import shardtree
from shardtree.mapping import ShardedObject, ShardedTensor
from shardtree.storage import LocalStorage
from shardtree.world import World, distributed, one_process
from tests.options import save_keywords

OBJECTS = {"safetensors", "torch_dist", "dcp", "zarr"}  # formats that hold more than tensors
ANY_TRACER = 0x59616D61, -1  # prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY): a sibling may trace where Yama minds


def tree(rank: int, ranks: int, request: dict[str, Any]) -> dict[str, Any]:
    """Return a rank's part: tensors cut over the ranks, one that all hold, and an object where the format has those."""
    value, columns = request["value"], request["columns"]
    tensors = {
        f"w{n}": ShardedTensor.from_rank_offsets(f"w{n}", torch.full((2, columns), value), (0, rank, ranks))
        for n in range(request["tensors"])
    }
    tensors["norm"] = ShardedTensor.from_rank_offsets("norm", torch.full((3,), value), replica_id=rank)
    if request["backend"][0] not in OBJECTS:
        return tensors
    return {**tensors, "rng": ShardedObject("rng", value, (1,), (0,), rank), "step": value}


class InPlace(LocalStorage):
    """The planted fault: a storage that writes the new content into the file itself."""

    def replace(self, name: str, data: bytes, *, durable: bool) -> None:
        self.write(name, [memoryview(data)], durable=durable)


class Untidy(LocalStorage):
    """The planted fault: a storage on which nothing is ever removed."""

    def remove(self, name: str) -> None:
        pass


class Deaf(LocalStorage):
    """The planted fault: a storage that takes a refused write for a write."""

    def write(self, name: str, buffers: Any, *, durable: bool) -> int:
        data = [bytes(buffer) for buffer in buffers]
        try:
            return super().write(name, map(memoryview, data), durable=durable)
        except shardtree.errors.StorageError:
            return sum(map(len, data))


STORAGES = {"in place": InPlace, "untidy": Untidy, "deaf": Deaf}


def save(world: World, request: dict[str, Any]) -> None:
    who, _, moment = request["death"].partition(":")
    place, options = dying.options(moment if who == str(world.rank) else "", request["folder"])
    if request["storage"] != "sound":
        place = STORAGES[request["storage"]](request["folder"])
    part, backend = tree(world.rank, world.size, request), tuple(request["backend"])
    shardtree.save(part, place, backend, world=world, overwrite=request["overwrite"], **save_keywords(**options))


def load(world: World, request: dict[str, Any]) -> None:
    target = tree(world.rank, world.size, {**request, "value": 0.0})
    loaded = shardtree.load(
        target, request["folder"], world=world, options=shardtree.LoadOptions(verify=request["verify"])
    )
    assert all(bool((loaded[key] == request["value"]).all()) for key in target if key[0] in "wn"), "silently wrong"


def run_rank(rank: int, request: dict[str, Any], scratch: str, line: socket.socket) -> None:
    """Be one rank, from its start to its end."""
    # A socket, because what is written to a pipe would count among the writes.
    ctypes.CDLL(None).prctl(*ANY_TRACER)
    ranks, timeout = request["ranks"], request["timeout"]
    world = one_process()
    if ranks > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(f"{scratch}/store", ranks)
        patience = timedelta(seconds=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=patience)
        world = distributed(timeout=timeout)
    line.send(b"ready\n")
    line.recv(1)
    limit(request)
    end: dict[str, Any] = {"error": None}
    try:
        {"save": save, "load": load}[request["do"]](world, request)
    except BaseException as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        end = {"error": type(error).__name__, "kinds": [kind.__name__ for kind in type(error).__mro__], "text": text}
    line.send(json.dumps(end).encode() + b"\n")
    line.recv(1)  # nobody goes before all have ended: who fails because this one is gone is heard after it


def first_free_descriptor() -> int:
    descriptor = os.dup(0)
    os.close(descriptor)
    return descriptor


def limit(request: dict[str, Any]) -> None:
    """Set what the request limits: how many files are open, and how long a file gets."""
    if request["open_files"] is not None:
        most = request["open_files"] + first_free_descriptor()
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if request["nobody"]:
        os.seteuid(65534)
    if request["file_bytes"] is not None:
        # Beyond the limit a write stops short, and the next one kills, or is refused.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN if request["refuse"] else signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_bytes"], request["file_bytes"]))


class Rank(NamedTuple):
    pid: int
    line: socket.socket

    def says(self, seconds: float) -> str:
        """Return what it says next; nothing if it died."""
        self.line.settimeout(seconds)
        said = b""
        while not said.endswith(b"\n"):
            try:
                piece = self.line.recv(65536)
            except TimeoutError:
                return "silent"
            except ConnectionResetError:
                piece = b""
            if not piece:
                return ""
            said += piece
        return said.decode()

    def tell(self) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            self.line.send(b"x")

    def end(self) -> int:
        """Return the signal that it died of, or 0."""
        self.tell()
        self.line.close()
        return max(0, -os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]))


def forked(rank: int, request: dict[str, Any], scratch: str) -> Rank:
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            run_rank(rank, request, scratch, theirs)
        finally:
            os._exit(0)
    theirs.close()
    return Rank(pid, ours)


def traced(pid: int, options: list[str]) -> subprocess.Popen[str]:
    """Return a tracer of a process's main thread, attached."""
    # Not of its other threads: those of gloo write as they please, which would spoil the count.
    command = ["strace", "-p", str(pid), "-y", "-s", "0", *options]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    said = tracer.stderr.readline()
    if "attached" not in said:
        raise RuntimeError(f"strace: {said}")
    return tracer


def run(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Return how each rank ended: killed by which signal, or with which error; or silent, still waiting for others."""
    with tempfile.TemporaryDirectory() as scratch:
        ranks = [forked(rank, request, scratch) for rank in range(request["ranks"])]
        started = [rank.says(60) for rank in ranks]
        tracers = [traced(ranks[int(rank)].pid, options) for rank, options in request["strace"].items()]
        for rank in ranks:
            rank.tell()
        # Whoever is traced is the one that dies; what becomes of the others is heard after it.
        order = sorted(range(len(ranks)), key=lambda rank: str(rank) not in request["strace"])
        said: dict[int, str] = {}
        for number in order:
            said[number] = ranks[number].says(request["timeout"] + 20)  # what a busy machine may take, besides
            if said[number] == "silent" or (request["all_die"] and not said[number]):
                for rank in ranks:
                    os.kill(rank.pid, signal.SIGKILL)
        signals = [rank.end() for rank in ranks]
        for tracer in tracers:
            tracer.communicate(timeout=30)
    assert set(started) == {"ready\n"}, started
    nothing: dict[str, Any] = {"error": None}
    ends = [json.loads(said[rank]) if said[rank].startswith("{") else dict(nothing) for rank in range(len(ranks))]
    return [
        {**end, "signal": one, "silent": said[rank] == "silent"}
        for rank, (end, one) in enumerate(zip(ends, signals, strict=True))
    ]


def warm() -> None:
    """Have everything imported and made that a save or a load makes once."""
    torch.set_num_threads(1)
    logging.getLogger("shardtree").addHandler(logging.NullHandler())
    for backend in (("safetensors", 1), ("torch_dist", 1), ("dcp", 1), ("zarr", 3), ("huggingface", 1)):
        with tempfile.TemporaryDirectory() as folder:
            part = tree(0, 1, {"backend": backend, "value": 1.0, "tensors": 1, "columns": 3})
            shardtree.save(part, folder, backend, options=shardtree.SaveOptions(durable=False))
            shardtree.load(part, folder)
    until = time.monotonic() + 60
    while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < until:
        time.sleep(0.01)  # a thread may still remove the note of who saved, which takes a while on a busy disk
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has one thread: others would be missed"


def main() -> None:
    warm()
    print("warm", flush=True)  # noqa: T201
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()

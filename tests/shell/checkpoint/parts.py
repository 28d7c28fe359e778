"""What tests save, in which formats, and what is in a folder then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

import shardtree as st
from shardtree.storage import MemoryStorage, Reader, Storage, wrapped
from tests.options import save_keywords

FORMATS = [("safetensors", 1), ("torch_dist", 1), ("dcp", 1), ("zarr", 3)]
"""Those that hold whatever a tree has."""
ALL_FORMATS = [*FORMATS, ("huggingface", 1)]

whole = st.ShardedTensor.from_rank_offsets


def saved(tree: Any, *backend: Any, **options: Any) -> MemoryStorage:
    """Return a new folder to which one process has saved a tree."""
    folder = MemoryStorage()
    st.save(tree, folder, *backend, **save_keywords(**options))
    return folder


def saved_tensors(**tensors: torch.Tensor) -> MemoryStorage:
    """Return a new folder with whole tensors, by their keys."""
    return saved({key: whole(key, tensor) for key, tensor in tensors.items()})


def saved_by(trees: Sequence[Any], **options: Any) -> MemoryStorage:
    """Return a new folder to which ranks have saved a tree each."""
    folder = MemoryStorage()
    st.simulate(len(trees), lambda world: st.save(trees[world.rank], folder, world=world, **save_keywords(**options)))
    return folder


def files(folder: Storage, inside: str = "") -> list[str]:
    """Return the names of all files of a folder."""
    names = [f"{inside}/{name}" if inside else name for name in folder.names(inside)]
    return [file for name in names for file in ([name] if folder.length(name) is not None else files(folder, name))]


class NotingReader:
    """A reader that tells which bytes it is asked for."""

    def __init__(self, reader: Reader, note: Callable[[int, int], object]) -> None:
        self.reader, self.note, self.length = reader, note, reader.length

    def read_into(self, byte: int, buffers: Sequence[memoryview]) -> None:
        self.note(byte, byte + sum(buffer.nbytes for buffer in buffers))
        self.reader.read_into(byte, buffers)

    def read(self, begin: int = 0, end: int | None = None) -> memoryview:
        found = self.reader.read(begin, end)
        self.note(begin, begin + found.nbytes)
        return found


def noting(storage: Storage, note: Callable[[str, int, int], object]) -> Any:
    """Return a storage that tells which bytes are read, from where to where in which file."""

    @contextmanager
    def opened(name: str) -> Iterator[Any]:
        with storage.open(name) as reader:
            yield NotingReader(reader, partial(note, name))

    def read(name: str) -> bytes:
        data = storage.read(name)
        note(name, 0, len(data))
        return data

    return wrapped(storage, open=opened, read=read)


def counted(storage: Storage) -> Any:
    """Return a storage that adds up the bytes that are read, by file: `counts`."""
    counts = Counter[str]()
    found = noting(storage, lambda name, begin, end: counts.update({name: end - begin}))
    found.counts = counts
    return found


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its memory, as FSDP leaves those that others hold meanwhile."""
    tensor.untyped_storage().resize_(0)
    return tensor


class Killed(BaseException):
    """What no handler catches, as it doesn't see a kill."""

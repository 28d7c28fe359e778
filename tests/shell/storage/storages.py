"""Every kind of storage, each empty: what the storage suite runs over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from shardtree.shell.storage import make_folder, storage_at
from shardtree.storage import LocalStorage, MemoryStorage, Storage


class ObjectStore(MemoryFileSystem):
    """A store that has no folders, as S3 has none: only names with slashes in them."""

    protocol = "objects"
    store: dict[str, object] = {}  # noqa: RUF012 - the base class has it there
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.removeprefix("objects://"))

    def mkdir(self, path: str, create_parents: bool = True, **options: object) -> None:
        pass

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def rmdir(self, path: str) -> None:
        raise FileNotFoundError(path)


fsspec.register_implementation("objects", ObjectStore, clobber=True)

STORAGES: dict[str, Callable[[Path], Storage]] = {
    "local": lambda folder: LocalStorage(str(folder / "checkpoint")),
    "memory": lambda folder: MemoryStorage(),
    "memory://": lambda folder: storage_at(f"memory://{uuid4().hex}/checkpoint"),
    "objects://": lambda folder: storage_at(f"objects://bucket/{uuid4().hex}"),
    "file://": lambda folder: storage_at(f"file://{folder}/checkpoint"),
}


def made(kind: str, folder: Path) -> Storage:
    """Return a storage of a kind, whose folder is there."""
    storage = STORAGES[kind](folder)
    make_folder(storage)
    return storage

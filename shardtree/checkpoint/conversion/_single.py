"""A single .safetensors file as a destination: a model's folder, hidden until it is whole, gives up its only file."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import AlreadyACheckpoint, StorageError, error_text
from ...storage import Directory, Storage, folder_in, in_larger_requests, is_folder, move, storage_at, sync_folder
from ...strategies import Strategies, StrategyAction, huggingface, table_of

_FILE = re.compile(r".+\.(safetensors|bin|pt|pth)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SingleFile:
    """A file that a conversion writes in the place of a folder.

    Attributes:
        above: the folder that it will be in.
        name: its own.
    """

    above: Storage
    name: str

    @property
    def folder(self) -> str:
        """The name of the hidden folder, the same in each call: a conversion is resumed there."""
        return f".{self.name}.convert"

    def draft(self) -> Storage:
        """Return the hidden folder."""
        return folder_in(self.above, self.folder)

    def put(self, *, durable: bool) -> None:
        """Give the file its name, once its folder was compared."""
        move(self.above, f"{self.folder}/model.safetensors", self.name)
        if durable:
            sync_folder(self.above)


def single_file(where: Directory, backends: Sequence[tuple[str, int]]) -> SingleFile | None:
    """Return the file that a destination names, None if it is a folder.

    Args:
        where: a path, a URL or a storage, which is always a folder.
        backends: of the shards and of the common state.

    Raises:
        AlreadyACheckpoint: the file is there.
        StorageError: it would be a pickle, or the format is a folder.

    Examples:
        >>> single_file("/runs/step_10", [("dcp", 1), ("dcp", 1)]) is None
        True
    """
    if isinstance(where, Storage):
        return None
    path = os.fspath(where)
    name = path.rpartition("/")[2]
    if not _FILE.fullmatch(name) or is_folder(storage_at(path)):
        return None
    fix = "Name a folder; or, in the format huggingface, a .safetensors file."
    if not name.endswith(".safetensors"):
        raise StorageError(error_text(f"convert: {path!r} names a pickle, and none is written", fix=fix))
    if others := [backend for backend, _ in dict.fromkeys(backends) if backend != "huggingface"]:
        what = f"convert: {path!r} names a file, and {' and '.join(others)} is written as a folder"
        raise StorageError(error_text(what, fix=fix))
    if storage_at(path).length("") is not None:
        what = f"convert: the file {path!r} is there already"
        raise AlreadyACheckpoint(error_text(what, fix="Convert to another one."))
    return SingleFile(in_larger_requests(storage_at(path[: -len(name)] or ".")), name)


def in_one_file(strategies: Strategies | None) -> Strategies:
    """Return the table in which a Hugging Face model has one file, of whatever length."""
    row = (StrategyAction.SAVE_SHARDED, "huggingface", 1)
    return {**table_of(strategies), row: huggingface.save_sharded_up_to(2**63)}

"""A single .safetensors file as a destination: it is written in a hidden folder, verified, and moved into place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import AlreadyACheckpoint, StorageError, StrategyError, error_text
from ..formats import huggingface
from ..shell.checkpoint.saving import named_file
from ..shell.storage import (
    Directory,
    Storage,
    folder_in,
    is_folder,
    locked,
    move,
    storage_at,
    sync_folder,
    with_own_refusals,
)
from ..shell.table import Strategies, StrategyAction, default_strategies, table_of
from ..stores import in_larger_requests

_DRAFT = "model.safetensors"


@dataclass(frozen=True, slots=True)
class SingleFile:
    """A file that a conversion writes instead of a folder.

    The model is written to a hidden folder beside it, and the only file of this folder is then moved into place.

    Attributes:
        above: Storage of the folder that will contain it.
        name: Name of the file.
        is_there: Whether an earlier call moved the file into place, and was killed before it removed the hidden folder.
    """

    above: Storage
    name: str
    is_there: bool

    @property
    def folder(self) -> str:
        """Name of the hidden folder; it is the same in each call, so that a killed conversion is resumed there."""
        return f".{self.name}.convert"

    def draft(self) -> Storage:
        """Return the storage of the hidden folder, in which the model is written."""
        return folder_in(self.above, self.folder)

    def place(self) -> Storage:
        """Return the storage to open the written model from: the final file if it exists, else the hidden folder."""
        return folder_in(self.above, self.name) if self.is_there else self.draft()

    def refusal(self) -> AlreadyACheckpoint:
        """Return the error for a file that exists already."""
        heading = f"convert: the file {self.above.where(self.name)!r} exists already"
        return AlreadyACheckpoint(error_text(heading, fix="Convert to another file."))

    def conflict(self) -> AlreadyACheckpoint:
        """Return the error for a hidden folder with another conversion's finished model, not yet moved into place."""
        heading = f"convert: another conversion to {self.above.where(self.name)!r} was killed before its last step"
        state = f"the finished model in {self.above.where(self.folder)!r}"
        fix = "Repeat that conversion to finish it, or convert to another file."
        return AlreadyACheckpoint(error_text(heading, found=state, fix=fix))

    def put(self, *, durable: bool) -> None:
        """Move the file into place, after the hidden folder was verified.

        Raises:
            AlreadyACheckpoint: Another program has made a file of that name meanwhile.
        """
        if self.is_there:
            return
        with locked(self.above):
            if self.above.length(self.name) is not None:
                error, where = self.refusal(), self.above.where(f"{self.folder}/{_DRAFT}")
                note = f"convert: {where!r} was written, and the same call moves it once that file is elsewhere"
                error.add_note(note)
                raise error
            move(self.above, f"{self.folder}/{_DRAFT}", self.name)
        if durable:
            sync_folder(self.above)


def single_file(where: Directory, backends: Sequence[tuple[str, int]]) -> SingleFile | None:
    """Return the file that a destination names; None if it is a folder.

    Args:
        where: Path, URL or storage; a storage is always a folder.
        backends: Backends of the shards and of the common state.

    Raises:
        AlreadyACheckpoint: The file exists, and isn't that of a conversion which was killed before it cleaned up.
        StorageError: The destination names a pickle, or the format writes a folder.

    Examples:
        >>> single_file("/runs/step_10", [("dcp", 1), ("dcp", 1)]) is None
        True
    """
    if isinstance(where, Storage) or (name := named_file(where)) is None:
        return None
    path = os.fspath(where)
    fix = "Name a folder; or, in the format huggingface, a .safetensors file."
    if not name.endswith(".safetensors"):
        raise StorageError(error_text(f"convert: {path!r} names a pickle, which is never written", fix=fix))
    if others := [backend for backend, _ in dict.fromkeys(backends) if backend != "huggingface"]:
        heading = f"convert: {path!r} names a file, and {' and '.join(others)} is written as a folder"
        raise StorageError(error_text(heading, fix=fix))
    above = in_larger_requests(with_own_refusals(storage_at(path[: -len(name)] or ".")))
    file = SingleFile(above, name, is_there=above.length(name) is not None)
    # Moving the file is the last step: if the hidden folder still has its file, the other one is another program's.
    if file.is_there and (not is_folder(above, file.folder) or file.draft().length(_DRAFT) is not None):
        raise file.refusal()
    return file


def in_one_file(strategies: Strategies | None) -> Strategies:
    """Return a dispatch table that saves a Hugging Face model as one file, whatever its length.

    Raises:
        StrategyError: The given table replaces the default function that saves such models.
    """
    row = (StrategyAction.SAVE_SHARDED, "huggingface", 1)
    if table_of(strategies)[row] is not default_strategies[row]:
        heading = "convert: a single file cannot be written with a custom save function or a limit on file sizes"
        fix = "Convert to a folder, or leave out the custom function or limit (--max-file-size, save_sharded_up_to)."
        raise StrategyError(error_text(heading, fix=fix))
    return {**table_of(strategies), row: huggingface.save_sharded_up_to(2**63)}

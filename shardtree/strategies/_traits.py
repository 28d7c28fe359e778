"""Traits of a format: what the rest of the library has to know of it, the same data for our formats and others'."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from ..storage import Storage, can

METADATA_FILE = "metadata.json"


@dataclass(frozen=True, slots=True)
class FormatTraits:
    """What a format's DESCRIBE row returns; the defaults hold for a format without such a row.

    Attributes:
        decided_by: patterns (as in `fnmatch`) of the names of the files that make a folder a checkpoint of the format:
            if one of them changes, it is another checkpoint.
        in_save_folder: whether all files of a save are in the folder `pending.save_id`. No other save's files have
            their names then: a save overwrites by writing beside the old one, and open files are never another save's.
        cuts_chunks: when a part of a stored chunk costs no more to read than its share of the bytes, so that ranks that
            read for each other may divide it: "always", "unchecked" (where no checksums are compared, since those are
            of whole chunks), or "never" (where chunks are decoded whole, or LOAD_SHARDED takes no flat ranges).
        fills_devices: whether LOAD_SHARDED can fill memory on any device with staged copies, such as CUDA; without,
            shards on devices are loaded into the host's memory first.
        is_guess: whether RECOGNIZE accepts any file of its kind, whatever its purpose; formats with an index of their
            own are tried first.
        shares_files: whether several ranks write to one file, each its own bytes. Where a storage takes files whole,
            all of a tensor has to come from one rank then.
        has_manifest: whether Megatron-Core may have written its `integrity.json` beside such a checkpoint.

    Examples:
        >>> FormatTraits(decided_by=("catalog.json",)).fills_devices
        False
    """

    decided_by: tuple[str, ...] = (METADATA_FILE,)
    in_save_folder: bool = False
    cuts_chunks: Literal["always", "unchecked", "never"] = "never"
    fills_devices: bool = False
    is_guess: bool = False
    has_manifest: bool = False
    shares_files: bool = False


Stamp = tuple[tuple[str, int, float], ...]
"""Name, length in bytes and time of the last change of each file that decides which checkpoint is in a folder."""


def stamp(storage: Storage, decided_by: Iterable[str]) -> Stamp:
    """Return the stamp of the checkpoint in a folder; () behind URLs, where none is replaced whole and looks take long.

    Formats without a metadata.json of ours have no hash that would name one save; their files have fixed names, and
    only length and time differ from another save's.

    Args:
        storage: the folder.
        decided_by: patterns of the names of the files that decide.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> storage = MemoryStorage()
        >>> storage.replace("zarr.json", b"{}", durable=False)
        >>> [name for name, *_ in stamp(storage, ["zarr.json"])]
        ['zarr.json']
    """
    if can(storage).late_requests:
        return ()
    names = [name for name in storage.names() if is_deciding(name, decided_by)]
    found = ((name, storage.length(name), storage.changed(name)) for name in names)
    return tuple((name, length, changed or 0.0) for name, length, changed in found if length is not None)


def is_deciding(name: str, decided_by: Iterable[str]) -> bool:
    """Return whether a file's name is one by which checkpoints are recognised.

    Examples:
        >>> is_deciding(".metadata", [".metadata"]), is_deciding("config.json", ["*.safetensors"])
        (True, False)
    """
    return any(fnmatchcase(name, pattern) for pattern in decided_by)

"""Traits of a format: what the rest of the library has to know of it, the same data for our formats and others'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ...core.codec import parse_json
from ..storage import Storage

METADATA_FILE = "metadata.json"
"""Name of the file that makes a folder a checkpoint, written last."""


def seems_whole(storage: Storage, name: str) -> bool:
    """Return whether a file holds anything, which is JSON if its name says so.

    Args:
        storage: Folder of the file.
        name: Name of the file.

    Raises:
        CorruptCheckpoint: It isn't JSON.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> folder = MemoryStorage()
        >>> folder.replace("catalog.json", b"{}", durable=False)
        >>> seems_whole(folder, "catalog.json")
        True
    """
    with storage.open(name) as reader:
        if name.endswith(".json"):
            parse_json(reader.read(), name)
        return reader.length > 0


@dataclass(frozen=True, slots=True)
class FormatTraits:
    """What a format's DESCRIBE row returns; the defaults hold for a format without such a row.

    Attributes:
        decided_by: patterns (as in `fnmatch`) of the names of the files that make a folder a checkpoint of the format:
            if one of them changes, it is another checkpoint. A folder without any is not shown to RECOGNIZE.
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
        writes_common: whether SAVE_SHARDED writes some of the common state into the files of tensors, so that these are
            other files with another common state: a conversion is resumed only with the same one.
        manifest: Name of a file with the hashes of all others that another program may have written beside such a
            checkpoint; empty if none does. It is read by `verify`, and no save goes to a folder where an old one is.
        is_whole: Function from the folder and the name of a file that decides to whether the file ends as one of its
            kind does, which a part of one doesn't: a checkpoint whose deciding file changed and is whole was replaced
            by a later save. It may raise CheckpointingException for one that isn't.

    Examples:
        >>> FormatTraits(decided_by=("catalog.json",)).fills_devices
        False
    """

    decided_by: tuple[str, ...] = (METADATA_FILE,)
    in_save_folder: bool = False
    cuts_chunks: Literal["always", "unchecked", "never"] = "never"
    fills_devices: bool = False
    is_guess: bool = False
    manifest: str = ""
    shares_files: bool = False
    writes_common: bool = False
    is_whole: Callable[[Storage, str], bool] = seems_whole


Stamp = tuple[tuple[str, int, float], ...]
"""Name, length in bytes and time of the last change of each file that decides which checkpoint is in a folder."""

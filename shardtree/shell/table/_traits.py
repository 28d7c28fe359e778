"""Traits of a format: the facts that the rest of the library needs, for our own formats and others' alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ...core.codec import parse_json
from ..storage import Storage

METADATA_FILE = "metadata.json"
"""Name of the file that makes a folder a checkpoint, written last."""


def seems_whole(storage: Storage, name: str) -> bool:
    """Return whether a file seems complete, which means that it is not empty.

    A file whose name ends in ``.json`` is also parsed, since truncated JSON is invalid.

    Args:
        storage: Folder of the file.
        name: Name of the file.

    Raises:
        CorruptCheckpoint: the content of a ``.json`` file isn't JSON.

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
    """The traits of a format, which its DESCRIBE row returns; a format without this row has the defaults.

    Names in capitals, such as DESCRIBE, are actions: members of `StrategyAction`.

    Attributes:
        decided_by: Patterns (as in `fnmatch`) of the names of the deciding files: these make a folder a checkpoint of
            the format, and a change in one makes it another checkpoint. RECOGNIZE sees only folders with such a file.
        in_save_folder: Whether all files of a save are in the folder `pending.save_id`. Then file names never repeat:
            an overwriting save writes beside the old files, and a file that is open for reading keeps its content.
        cuts_chunks: Condition under which a part of a stored chunk can be read without the rest. Then ranks that read
            for each other may divide the chunk. "always"; "unchecked": only if no checksums are compared, since these
            cover whole chunks; "never": chunks are decoded whole, or LOAD_SHARDED takes no flat ranges.
        fills_devices: Whether LOAD_SHARDED can fill tensors on a device such as CUDA, part by part. Otherwise shards on
            devices are first loaded into the host's memory.
        is_guess: Whether RECOGNIZE accepts every file of a common type, such as a lone safetensors file, no matter
            which program wrote it. All other formats are tried first.
        shares_files: Whether several ranks write parts of the same file. On a storage that takes only whole files, one
            rank must then hold each tensor whole.
        writes_common: Whether SAVE_SHARDED writes some of the common state into the tensors' files, so that these
            depend on it: a conversion is resumed only with the same common state.
        manifest: Name of a file that another program may have written beside such a checkpoint, with the hashes of all
            other files; empty if there is none. `verify` reads it, and saves refuse folders with an old manifest.
        is_whole: Function that takes a folder and the name of a deciding file, and returns whether the file is
            complete; for a truncated file, it returns False or raises CheckpointingException. A deciding file that has
            changed and is complete means that a later save replaced the checkpoint.

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
"""Name, length in bytes and time of the last change of each deciding file in a folder."""

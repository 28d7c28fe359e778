"""Traits of a format: what the rest of the library has to know of it, the same data for our formats and others'."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
        writes_common: whether SAVE_SHARDED writes some of the common state into the files of tensors, so that these are
            other files with another common state: a conversion is resumed only with the same one.
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
    writes_common: bool = False


Stamp = tuple[tuple[str, int, float], ...]
"""Name, length in bytes and time of the last change of each file that decides which checkpoint is in a folder."""

"""The files of ranks' parts in a folder, by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...errors import CorruptCheckpoint, error_text
from ...kit import Fields, Storage, fields_of_backend

BACKEND, VERSION = "dcp_safetensors", 1

_NAME = re.compile(r"shard-\d{5,9}-model-\d{5,9}-of-(\d{5,9})\.safetensors", re.ASCII)

# These files say that the folder has the whole model too: consolidated parts, or another save of the model.
_WHOLE = re.compile(r"(model|diffusion_pytorch_model)\.safetensors(\.index\.json)?")


def recognize(storage: Storage) -> Fields | None:
    """Return the fields that metadata.json would have for a folder of ranks' parts; None for anything else.

    A folder that also has the whole model, for example after consolidation in place, is read as a Hugging Face model.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> storage = MemoryStorage()
        >>> storage.replace("shard-00001-model-00001-of-00001.safetensors", b"", durable=False)
        >>> recognize(storage)["sharded_backend"]
        'dcp_safetensors'
        >>> storage.replace("model.safetensors", b"", durable=False)
        >>> recognize(storage) is None
        True
    """
    if storage.length("") is not None:
        return None
    names = storage.names()
    if any(map(_WHOLE.fullmatch, names)) or not any(map(_NAME.fullmatch, names)):
        return None
    return fields_of_backend(BACKEND, VERSION)


def part_files(names: Iterable[str], where: str) -> tuple[str, ...]:
    """Return the names of the ranks' files, sorted.

    Args:
        names: Names in the folder.
        where: Location of the folder, for errors.

    Raises:
        CorruptCheckpoint: The folder has no such files, or files of several saves.

    Examples:
        >>> part_files(["shard-00001-model-00001-of-00001.safetensors", "config.json"], "example")
        ('shard-00001-model-00001-of-00001.safetensors',)
    """
    matches = {name: match for name in sorted(names) if (match := _NAME.fullmatch(name)) is not None}
    counts = {int(match[1]) for match in matches.values()}
    if len(counts) != 1:
        found = " and ".join(f"files named *-of-{count:05}" for count in sorted(counts)) or "no such file"
        heading = f"open: {where!r} does not hold the files of one save"
        expected = "files named shard-RRRRR-model-NNNNN-of-NNNNN, all with the same number at the end"
        fix = "Open the folder that the save wrote."
        if counts:
            fix = "Move the files of all saves but one away; nothing in the files says which save is current."
        raise CorruptCheckpoint(error_text(heading, found=found, expected=expected, fix=fix))
    return tuple(matches)

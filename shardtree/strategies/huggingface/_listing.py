"""Which files a model consists of, and which of its tensors is in which: the index JSON, never trusted unchecked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from ...codec import parse_json
from ...errors import CorruptCheckpoint, error_text
from ...storage import Storage
from .._values import Checkpoint
from ._names import INDEX_SUFFIX, find_weights

_MOST_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Listing:
    """What a model consists of, before a file is opened.

    Attributes:
        name: of the file that says it: the index, or the single file.
        files: names in the checkpoint's storage, each once.
        weight_map: the file of each tensor; None where all tensors of all files count.
        total_size: bytes of all tensors, as the index has it; None where it doesn't say.
    """

    name: str
    files: tuple[str, ...]
    weight_map: Mapping[str, str] | None = None
    total_size: float | None = None


def read_listing(checkpoint: Checkpoint) -> Listing:
    """Return what a model consists of.

    Raises:
        CorruptCheckpoint: nothing that could be one is there (any more), or the index isn't sound.
    """
    named = checkpoint.fields.get("tensor_files")
    if named is not None:
        return _from_metadata(named)
    name = find_weights(checkpoint.storage)
    if name is None:
        where = checkpoint.storage.where()
        expected = "one .safetensors file, or one .safetensors.index.json"
        raise CorruptCheckpoint(error_text(f"open: {where!r} holds no model's weights", expected=expected))
    return read_index_json(checkpoint.storage, name) if name.endswith(INDEX_SUFFIX) else Listing(name, (name,))


def read_index_json(storage: Storage, name: str) -> Listing:
    """Return what an index file says.

    Raises:
        CorruptCheckpoint: it isn't JSON of the form ``{"weight_map": {tensor: file}}``, or a file isn't in the folder.
    """
    where = storage.where(name)
    length = storage.length(name)
    if length is None or length > _MOST_BYTES:
        raise _unsound(where, "no such file" if length is None else f"{length} bytes", f"at most {_MOST_BYTES} bytes")
    value = parse_json(storage.read(name), f"open: {where!r}")
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weight_map, dict):
        raise _unsound(where, "no weight_map", '{"weight_map": {tensor: file}}')
    inside = {file for file in {each for each in weight_map.values() if isinstance(each, str)} if _is_inside(file)}
    for key, file in weight_map.items():
        if not isinstance(file, str) or file not in inside:
            raise _unsound(where, f"{key[:200]!r}: {file!r}"[:500], "names of files in the same folder")
    return Listing(name, tuple(sorted(set(weight_map.values()))), weight_map, _total_size(value))


def _total_size(value: Mapping[str, Any]) -> float | None:
    metadata = value.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return total if isinstance(total, (int, float)) and not isinstance(total, bool) else None


def _from_metadata(named: Any) -> Listing:
    if isinstance(named, list) and all(_is_inside(name) for name in named) and len(set(named)) == len(named):
        return Listing("metadata.json", tuple(named))
    raise _unsound("metadata.json", f"tensor_files = {named!r}"[:500], "names of files in the same folder")


def _is_inside(name: Any) -> bool:
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and path.name != ""


def _unsound(where: str, found: str, expected: str) -> CorruptCheckpoint:
    fix = "It was damaged or edited; fetch it again."
    return CorruptCheckpoint(error_text(f"open: {where!r} is not sound", found=found, expected=expected, fix=fix))

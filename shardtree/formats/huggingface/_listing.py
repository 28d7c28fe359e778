"""The files of a model and the file of each tensor: the index JSON, which is checked before it is used."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from ...errors import CorruptCheckpoint, error_text
from ...kit import (
    Checkpoint,
    Fields,
    Storage,
    fields_of_backend,
    header_of,
    listed,
    parse_json,
)

# This section has the names of a Hugging Face model's files, and chooses the one by which a folder is read.

BACKEND, VERSION = "huggingface", 1

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
SINGLE_FILE = f"model{SUFFIX}"
INDEX_FILE = f"model{INDEX_SUFFIX}"

_USUAL_STEMS = ("model", "diffusion_pytorch_model")
_ONE_OF_SEVERAL = re.compile(r"(.*-)?\d+-of-\d+\.safetensors", re.DOTALL)


def recognize(storage: Storage) -> Fields | None:
    """Return the fields that metadata.json would have for a model's folder or a safetensors file; None for others.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> recognize(MemoryStorage()) is None
        True
    """
    if find_weights(storage) is None:
        return None
    return fields_of_backend(BACKEND, VERSION)


def is_whole(storage: Storage, name: str) -> bool:
    """Return whether a file is complete: a safetensors file as long as its header says, an index that is JSON.

    Raises:
        CorruptCheckpoint: The file is cut off, or is neither a safetensors file nor an index.
    """
    with storage.open(name) as reader:
        if name.endswith(INDEX_SUFFIX):
            parse_json(reader.read(), name)
        else:
            header_of(reader.read, reader.length)
        return reader.length > 0


def find_weights(storage: Storage) -> str | None:
    """Return the name of a model's index, or of its single safetensors file; None if there is no clear choice.

    The first of these that exists is chosen: model.safetensors, its index, diffusion_pytorch_model.safetensors, its
    index, the only index, the only safetensors file. One of several files, such as
    ``model-00001-of-00003.safetensors``, is not a model.

    Args:
        storage: Storage of a folder, or of a single file, whose name in it is "".

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> storage = MemoryStorage()
        >>> storage.replace("adapter_model.safetensors", b"", durable=False)
        >>> find_weights(storage)
        'adapter_model.safetensors'
    """
    with listed(storage, deep=False) as listing:
        if listing.length("") is not None:
            return "" if listing.where().endswith(SUFFIX) else None
        names = listing.names()
    singles = [name for name in names if name.endswith(SUFFIX) and not _ONE_OF_SEVERAL.fullmatch(name)]
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    for stem in _USUAL_STEMS:
        for group in (singles, indexes):
            suffix = SUFFIX if group is singles else INDEX_SUFFIX
            if f"{stem}{suffix}" in group:
                return f"{stem}{suffix}"
    return next((group[0] for group in (indexes, singles) if len(group) == 1), None)


def file_name(number: int, count: int) -> str:
    """Return the name of one of several files, counted from 0.

    Examples:
        >>> file_name(0, 3)
        'model-00001-of-00003.safetensors'
    """
    return f"model-{number + 1:05d}-of-{count:05d}{SUFFIX}"


def draft_name(save_id: str, number: int, count: int) -> str:
    """Return a file's name before the commit: in a subfolder, so that no program takes the file for a model's.

    Examples:
        >>> draft_name("save-1", 0, 3)
        'save-1/model-00001-of-00003.safetensors'
    """
    return f"{save_id}/{file_name(number, count)}"


_INDEX_BYTES = 512 * 1024 * 1024
"""Upper bound of the length of an index: a crafted one mustn't fill the memory."""


@dataclass(frozen=True, slots=True)
class ModelListing:
    """The files of a model, known before a safetensors file is opened.

    Attributes:
        name: Name of the file that lists the others: the index or metadata.json; or the name of the single file.
        files: Names of the safetensors files in the checkpoint's storage, without duplicates.
        weight_map: File of each tensor; None if all tensors of all files belong to the model.
        total_size: Number of bytes of all tensors, from the index; None if the index lacks it.
    """

    name: str
    files: tuple[str, ...]
    weight_map: Mapping[str, str] | None = None
    total_size: float | None = None


def read_listing(checkpoint: Checkpoint) -> ModelListing:
    """Return the files of a model.

    Raises:
        CorruptCheckpoint: The folder has no model, or the list of its files isn't sound.
    """
    # With another format's common state, metadata.json is the commit and lists the files; the index comes after it.
    tensor_files = checkpoint.fields.get("tensor_files")
    if tensor_files is not None:
        if (
            isinstance(tensor_files, list)
            and all(_is_inside(name) for name in tensor_files)
            and len(set(tensor_files)) == len(tensor_files)
        ):
            return ModelListing("metadata.json", tuple(tensor_files))
        raise _unsound("metadata.json", f"tensor_files = {tensor_files!r}"[:500], "names of files in the same folder")
    name = find_weights(checkpoint.storage)
    if name is None:
        where = checkpoint.storage.where()
        expected = "one .safetensors file, or one .safetensors.index.json"
        raise CorruptCheckpoint(error_text(f"open: {where!r} has no weights of a model", expected=expected))
    return read_index_json(checkpoint.storage, name) if name.endswith(INDEX_SUFFIX) else ModelListing(name, (name,))


def read_index_json(storage: Storage, name: str) -> ModelListing:
    """Return the content of an index file.

    Raises:
        CorruptCheckpoint: The file isn't JSON of the form ``{"weight_map": {tensor: file}}``, or names a file outside
            of the folder.
    """
    where = storage.where(name)
    length = storage.length(name)
    if length is None or length > _INDEX_BYTES:
        raise _unsound(where, "no such file" if length is None else f"{length} bytes", f"at most {_INDEX_BYTES} bytes")
    value = parse_json(storage.read(name), f"open: {where!r}")
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weight_map, dict):
        raise _unsound(where, "no weight_map", '{"weight_map": {tensor: file}}')
    # Each file's name is checked once rather than for each of its tensors.
    inside = {file for file in {name for name in weight_map.values() if isinstance(name, str)} if _is_inside(file)}
    for key, file in weight_map.items():
        if not isinstance(file, str) or file not in inside:
            raise _unsound(where, f"{key[:200]!r}: {file!r}"[:500], "names of files in the same folder")
    return ModelListing(name, tuple(sorted(set(weight_map.values()))), weight_map, _total_size(value))


def _total_size(value: Mapping[str, Any]) -> float | None:
    metadata = value.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return total if isinstance(total, (int, float)) and not isinstance(total, bool) else None


def _is_inside(name: Any) -> bool:
    """Return whether a name stays inside the folder; a crafted index may name any file."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and path.name != ""


def _unsound(where: str, found: str, expected: str) -> CorruptCheckpoint:
    fix = "It was damaged or edited; fetch it again."
    return CorruptCheckpoint(error_text(f"open: {where!r} is malformed", found=found, expected=expected, fix=fix))


# A tied tensor has the values of another one; an index may list it although no file has it.

_CONFIG = "config.json"
_TIED = re.compile(
    r"(.*\.)?(lm_head|embed_out|embed_tokens|shared|wte|output_layer|word_embeddings)\.weight", re.DOTALL
)


def are_tied(storage: Storage, keys: Iterable[str], stored_keys: Iterable[str]) -> bool:
    """Return whether missing tensors are tied, so that they have the values of a stored tensor.

    The result is True if config.json ties embeddings, and all missing tensors and one of the stored tensors are
    embeddings according to their keys.

    Args:
        storage: Storage of the model, with its config.json.
        keys: Keys of the missing tensors.
        stored_keys: Keys of the stored tensors.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> storage = MemoryStorage()
        >>> storage.replace("config.json", b'{"tie_word_embeddings": true}', durable=False)
        >>> are_tied(storage, ["lm_head.weight"], ["model.embed_tokens.weight"])
        True
    """
    if not all(map(_TIED.fullmatch, keys)) or not any(map(_TIED.fullmatch, stored_keys)):
        return False
    length = storage.length(_CONFIG)
    if length is None or length > _INDEX_BYTES:
        return False
    try:
        config = parse_json(storage.read(_CONFIG), _CONFIG)
    except CorruptCheckpoint:
        return False
    # In the config of a multimodal model, the part for text has the field.
    parts = [config, *config.values()] if isinstance(config, dict) else []
    return any(isinstance(part, dict) and part.get("tie_word_embeddings") is True for part in parts)


def list_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names of the weights' files and of their index; a config or tokenizer isn't part of the checkpoint.

    Raises:
        CorruptCheckpoint: The index isn't sound.
    """
    listing = read_listing(checkpoint)
    index = INDEX_FILE if "tensor_files" in checkpoint.fields else listing.name
    return tuple({*listing.files, index})

"""Loads of a Hugging Face model through an index made from its files' headers, and verification of its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...errors import CheckpointingException, CorruptCheckpoint, UnsupportedValue, error_text
from ...kit import (
    METADATA_FILE,
    Checkpoint,
    Damage,
    Finding,
    HeaderEntry,
    Index,
    IndexMetadata,
    ReadReport,
    ShardColumns,
    ShardedObject,
    ShardedTensor,
    Storage,
    StoredFile,
    TensorKind,
    Unchecked,
    box_column,
    build_index,
    check_taken,
    collector_paused,
    header_of,
    in_threads,
    kind_from_file,
    load_from_index,
    opened,
    stored_columns,
    threads_of,
    untaken_findings,
)
from ._listing import INDEX_FILE, ModelListing, are_tied, find_weights, read_index_json, read_listing
from ._texts import TEXTS, joined_texts

# This section reads the header of a safetensors file of any writer.

_FIRST_BYTES = 64 * 1024  # It suffices for most headers, so that one read replaces two.
_MOST_REQUESTS = 256
_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class WeightFile:
    """The header of a file.

    Attributes:
        name: Name in the checkpoint's storage.
        length: Length in bytes.
        data_start: Offset of the tensors' bytes in the file, from which `HeaderEntry.start` counts.
        entries: Header entries in the order of their bytes.
        texts: Strings in the header, by name.
    """

    name: str
    length: int
    data_start: int
    entries: tuple[HeaderEntry, ...]
    texts: dict[str, str]


def read_header(storage: Storage, name: str) -> WeightFile:
    """Return the header of a file.

    Raises:
        CorruptCheckpoint: The file is missing, or its header isn't sound or doesn't fit the file.
    """
    header = _header_if_there(storage, name)
    if header is None:
        fix = "Fetch it again, or load another checkpoint."
        raise CorruptCheckpoint(error_text(f"open: {storage.where(name)!r} is missing", fix=fix))
    return header


def _header_if_there(storage: Storage, name: str) -> WeightFile | None:
    where, size = storage.where(name), storage.length(name)
    if size is None:
        return None
    with opened(storage, name, size) as reader:
        try:
            entries, data_start, texts = header_of(reader.read, reader.length, _FIRST_BYTES)
            return WeightFile(name, reader.length, data_start, entries, texts)
        except CorruptCheckpoint as error:
            cause, fix = str(error), "It was damaged, or not fetched to its end; fetch it again, or load another one."
            # A model that was cloned without git-lfs has pointers in place of files.
            if bytes(reader.read(0, min(reader.length, len(_POINTER)))) == _POINTER:
                cause, fix = "a pointer of git-lfs", "Fetch the file itself: git lfs pull."
            heading = f"open: {where!r} is not a valid safetensors file"
            raise CorruptCheckpoint(error_text(heading, found=cause, fix=fix)) from error


def read_headers(storage: Storage, listing: ModelListing) -> list[WeightFile]:
    """Return the headers of a model's files, which are read concurrently.

    Some files of a model with an index may be missing, for example after an unfinished download, but not all.

    Raises:
        CorruptCheckpoint: A header isn't sound; see `read_header`.
    """
    names, threads = listing.files, threads_of(storage, None, _MOST_REQUESTS)
    headers = in_threads(partial(_header_if_there, storage), names, threads)
    if listing.weight_map is None or not any(headers):
        return [
            read_header(storage, name) if header is None else header
            for name, header in zip(names, headers, strict=True)
        ]
    return [header for header in headers if header is not None]


_MOST_AXES = 64  # This is NumPy's limit.
_MOST_NUMBERS = 2**25
"""Upper bound of the numbers in a column: all boxes get the axes of the widest tensor, which a crafted file chooses."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelContents:
    """Contents of a model's files.

    Attributes:
        index: Index of the model's tensors, each as one chunk.
        refusals: Reason that a tensor cannot be loaded, by key, including tensors that the index lists but no file has.
        texts: Strings in all files' headers, by name; a dict by file where files differ.
        needed: Minimum length that loads need a file to have, by file name; 0 for a missing file that the index names.
    """

    index: Index
    refusals: Mapping[str, str]
    texts: Mapping[str, str | dict[str, str]]
    needed: Mapping[str, int]


def read_contents(checkpoint: Checkpoint) -> ModelContents:
    """Return the contents of a model's files. The headers are read once per open checkpoint.

    Raises:
        CorruptCheckpoint: The index or a header isn't sound, they contradict each other, or a file is missing.
    """
    return checkpoint.once(parse)


def parse(checkpoint: Checkpoint) -> ModelContents:
    """Return the contents of a model's files. One rank calls this for all ranks."""
    # Parsing makes an entry for each tensor, which the collector would scan again and again, and no garbage.
    with collector_paused():
        listing = read_listing(checkpoint)
        return contents(listing, read_headers(checkpoint.storage, listing))


def contents(listing: ModelListing, files: Sequence[WeightFile]) -> ModelContents:
    """Return the contents of a model's files, given their headers.

    A tensor that the index does not list is not part of the model. A listed tensor is missing if its file is missing or
    lacks it, as for a tied tensor; other tensors can still be loaded.

    Raises:
        CorruptCheckpoint: A tensor is in two files, or not in the listed file but in another one; or all listed tensors
            are missing.
    """
    rows = _rows(listing, files)
    refusals = {entry.name: reason for _, entry in rows if (reason := refusal(entry))} | absent(listing, files)
    loadable_rows = sorted(
        ((file, entry) for file, entry in rows if entry.name not in refusals), key=lambda row: row[1].name
    )
    check_numbers([entry for _, entry in loadable_rows], listing.name)
    byte = [files[file].data_start + entry.start for file, entry in loadable_rows]
    index = build_index(
        _columns([entry for _, entry in loadable_rows]),
        np.array([file for file, _ in loadable_rows], dtype=np.int64),
        np.array(byte, dtype=np.int64),
        files=[StoredFile(file.name, file.length) for file in files],
    )
    needed = dict.fromkeys(listing.files, 0) | {file.name: file.length for file in files}
    return ModelContents(index, refusals, joined_texts((file.name, file.texts) for file in files), needed)


def check_numbers(entries: Sequence[HeaderEntry], where: str) -> None:
    """Raise if the headers declare so many tensors and axes that their index would be larger than any real model's.

    Args:
        entries: Tensors of all files.
        where: Name of the model, for errors.

    Raises:
        CorruptCheckpoint: The headers declare more tensors or axes than any real model has.
    """
    if len(entries) * max((len(entry.shape) for entry in entries), default=0) > _MOST_NUMBERS:
        raise CorruptCheckpoint(error_text(f"open: {where!r} declares more tensors and axes than any model has"))


def _rows(listing: ModelListing, files: Sequence[WeightFile]) -> list[tuple[int, HeaderEntry]]:
    """Return the header entries of the model's tensors, as pairs of the file's number and the entry."""
    rows: dict[str, tuple[int, HeaderEntry]] = {}
    for number, file in enumerate(files):
        for entry in file.entries:
            if listing.weight_map is not None and listing.weight_map.get(entry.name) != file.name:
                continue
            if entry.name in rows:
                other = files[rows[entry.name][0]].name
                heading = f"open: tensor {entry.name[:200]!r} is in two files"
                fix = "Files of different saves lie in the folder; fetch the model again."
                raise CorruptCheckpoint(error_text(heading, found=f"{other!r} and {file.name!r}", fix=fix))
            rows[entry.name] = number, entry
    index, there = listing.weight_map or {}, {entry.name for file in files for entry in file.entries}
    wrong = [
        f"{key[:200]!r} in {file!r}" for key, file in index.items() if key not in rows and (key in there or not rows)
    ]
    if wrong:
        heading = f"open: {listing.name!r} lists tensors that are not in the files named for them"
        fix = "Files and index belong to different saves; fetch them again."
        raise CorruptCheckpoint(error_text(heading, offenders=wrong, fix=fix))
    return list(rows.values())


def absent(listing: ModelListing, files: Sequence[WeightFile]) -> dict[str, str]:
    """Return, by key, why tensors that the index lists are missing: their file is missing, or lacks them."""
    there = {file.name: {entry.name for entry in file.entries} for file in files}
    lacking = {key: file for key, file in (listing.weight_map or {}).items() if key not in there.get(file, ())}
    return {
        key: f"{listing.name!r} lists it, and {file!r} " + ("does not have it" if file in there else "is missing")
        for key, file in lacking.items()
    }


def refusal(entry: HeaderEntry) -> str:
    """Return the reason that a tensor can't be loaded; "" if it can."""
    # The reason concerns only this tensor: others of the model still load.
    if not entry.name:
        return "it has no name"
    if len(entry.shape) > _MOST_AXES:
        return f"it has {len(entry.shape)} axes"
    try:
        kind_from_file(entry.tag, entry.shape)
    except UnsupportedValue as error:
        return str(error)
    return ""


def _columns(entries: Sequence[HeaderEntry]) -> ShardColumns:
    # A model repeats few kinds in many layers, so that each kind is made once.
    unique_kinds = {kind: TensorKind(*kind_from_file(*kind), 0) for kind in {entry[1:3] for entry in entries}}
    kinds = {entry.name: unique_kinds[entry[1:3]] for entry in entries}
    shape = box_column([kind.global_shape for kind in kinds.values()], fill=1)
    return stored_columns(kinds, np.arange(len(entries)), np.zeros_like(shape), shape)


def load_sharded(checkpoint: Checkpoint, shards: Sequence[ShardedTensor]) -> ReadReport:
    """Fill each shard's data, a contiguous CPU tensor, in place, and return a report of the reads.

    Raises:
        KeyMismatch: The model lacks a tensor.
        ShapeError: A tensor is stored with another shape or dtype.
        UnsupportedValue: A tensor has a dtype that torch lacks.
        CorruptCheckpoint: The files aren't sound, or contradict each other.
    """
    model_contents = read_contents(checkpoint)
    check_taken(model_contents.refusals, [shard.key for shard in shards])
    return load_from_index(checkpoint, model_contents.index, shards)


def load_metadata(checkpoint: Checkpoint) -> Mapping[str, ShardedTensor | ShardedObject]:
    """Return the tensors that can be loaded, by name, whole and without data."""
    model_contents = read_contents(checkpoint)
    files = partial(_needed_files, model_contents)
    return IndexMetadata(model_contents.index, untaken=model_contents.refusals, files=files)


def _needed_files(model_contents: ModelContents) -> Mapping[str, int]:
    return model_contents.needed


def load_common(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the common state: {"__metadata__": strings in the files' headers}, or {} if there are no strings."""
    texts = read_contents(checkpoint).texts
    return {TEXTS: dict(texts)} if texts else {}


# This section checks a Hugging Face model as far as its format allows: lengths, headers and the index.

_WHY = "this format carries no checksums: lengths, headers and the index are compared"


def verify_files(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """Return the damage of a model's files, then all files as unchecked, since the format has no checksums.

    Changed values aren't found: only lengths, headers and the agreement of the index with the files are checked.
    """
    try:
        listing = read_listing(checkpoint)
    except CheckpointingException as error:
        return (Damage(find_weights(checkpoint.storage) or "", str(error)),)
    damage = _damage(checkpoint, listing) or _damage_beside(checkpoint, listing)
    untaken = () if damage else untaken_findings(read_contents(checkpoint).refusals)
    return (*damage, *_unchecked_files(checkpoint, listing), *untaken)


def _unchecked_files(checkpoint: Checkpoint, listing: ModelListing) -> Iterator[Unchecked]:
    index = INDEX_FILE if listing.name == METADATA_FILE else listing.name
    for name in dict.fromkeys([index, *listing.files]):
        length = checkpoint.storage.length(name)
        if length is not None:
            yield Unchecked(name, _WHY, length)


def _damage_beside(checkpoint: Checkpoint, listing: ModelListing) -> tuple[Damage, ...]:
    """Return the damage of the index of a checkpoint that has a metadata.json too; () if it lacks either of them.

    Loads use the list of files in metadata.json, but other programs use the index.
    """
    # The index is written after metadata.json, which is the commit: a save that was killed in between has none.
    if listing.name != METADATA_FILE or checkpoint.storage.length(INDEX_FILE) is None:
        return ()
    try:
        return _damage(checkpoint, read_index_json(checkpoint.storage, INDEX_FILE))
    except CheckpointingException as error:
        return (Damage(INDEX_FILE, str(error)),)


def _damage(checkpoint: Checkpoint, listing: ModelListing) -> tuple[Damage, ...]:
    files, damages, keys = list[WeightFile](), list[Damage](), _keys(listing)
    for name in listing.files:
        try:
            files.append(read_header(checkpoint.storage, name))
        except CheckpointingException as error:
            damages.append(Damage(name, str(error), keys=tuple(sorted(keys.get(name, ())))))
    # The index is only compared with sound files, since a damaged header would make all its tensors seem missing.
    return tuple(damages) or _contradictions(checkpoint.storage, listing, files)


def _keys(listing: ModelListing) -> dict[str, list[str]]:
    """Return the keys that the index lists for each file."""
    by_file: dict[str, list[str]] = {}
    for key, file in (listing.weight_map or {}).items():
        by_file.setdefault(file, []).append(key)
    return by_file


def _contradictions(storage: Storage, listing: ModelListing, files: list[WeightFile]) -> tuple[Damage, ...]:
    """Return a `Damage` of the index if it contradicts the files, which are sound; otherwise ()."""
    try:
        contents(listing, files)
    except CheckpointingException as error:
        return (Damage(listing.name, str(error)),)
    lacking = absent(listing, files)
    if lacking and are_tied(storage, lacking, [entry.name for file in files for entry in file.entries]):
        return ()  # Tied tensors are reported as untaken; total_size may count them or not.
    if lacking:
        why = "tensors that it lists are not in their files, as for a tied tensor that is not stored twice"
        return (Damage(listing.name, why, keys=tuple(sorted(lacking))),)
    if listing.weight_map is None or listing.total_size is None:
        return ()
    entries = (entry for file in files for entry in file.entries if listing.weight_map.get(entry.name) == file.name)
    total = sum(entry.stop - entry.start for entry in entries)
    if total == listing.total_size:
        return ()
    return (Damage(listing.name, f"total_size is {listing.total_size}, the tensors have {total} bytes"),)

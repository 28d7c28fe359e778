"""Loading from a Hugging Face model, and checking one as far as its format allows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...errors import CheckpointingException
from ...mapping import ShardedObject, ShardedTensor
from ...storage import ReadReport, Storage
from .._checks import check_taken
from .._findings import Damage, Finding, Unchecked, untaken_findings
from .._traits import METADATA_FILE
from .._values import Checkpoint
from ..index import IndexMetadata, load_from_index
from ._contents import WeightFile, absent, contents, read_contents, read_header
from ._listing import Listing, are_tied, find_weights, read_listing


def load_sharded(checkpoint: Checkpoint, shards: Sequence[ShardedTensor]) -> ReadReport:
    """Fill each shard's data, a contiguous CPU tensor, in place, and return what was read.

    Raises:
        KeyMismatch: the model lacks a tensor.
        ShapeError: a tensor is stored with another shape or dtype.
        UnsupportedValue: a tensor has a dtype that torch lacks.
        CorruptCheckpoint: the files aren't sound, or don't fit each other.
    """
    found = read_contents(checkpoint)
    check_taken(found.refused, [shard.key for shard in shards])
    return load_from_index(checkpoint, found.index, shards)


def load_metadata(checkpoint: Checkpoint) -> Mapping[str, ShardedTensor | ShardedObject]:
    """Return every stored tensor by its name, whole and without data; not those that can't be loaded."""
    found = read_contents(checkpoint)
    return IndexMetadata(found.index, untaken=found.refused)


def load_common(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the strings that the files keep beside their tensors, as ``__metadata__``; {} if there are none."""
    texts = read_contents(checkpoint).texts
    return {"__metadata__": dict(texts)} if texts else {}


# Checking a Hugging Face model as far as its format allows: lengths, headers and the index

_WHY = "this format carries no checksums: lengths, headers and the index are compared"


def verify_files(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """Return what is wrong with a model's files, and that none of their bytes has a checksum.

    A changed value isn't found: only lengths, headers, and whether the index fits the files can be checked.
    """
    try:
        listing = read_listing(checkpoint)
    except CheckpointingException as error:
        return (Damage(find_weights(checkpoint.storage) or "", str(error)),)
    damage = _damage(checkpoint, listing)
    untaken = () if damage else untaken_findings(read_contents(checkpoint).refused)
    return (*damage, *_unchecked(checkpoint, listing), *untaken)


def _unchecked(checkpoint: Checkpoint, listing: Listing) -> Iterator[Unchecked]:
    for name in dict.fromkeys([listing.name, *listing.files]):
        length = checkpoint.storage.length(name)
        if length is not None and name != METADATA_FILE:
            yield Unchecked(name, _WHY, length)


def _damage(checkpoint: Checkpoint, listing: Listing) -> tuple[Damage, ...]:
    files, found, keys = list[WeightFile](), list[Damage](), _keys(listing)
    for name in listing.files:
        try:
            files.append(read_header(checkpoint.storage, name))
        except CheckpointingException as error:
            found.append(Damage(name, str(error), keys=tuple(sorted(keys.get(name, ())))))
    # The index is compared only with sound files: a damaged header would make all its tensors seem missing.
    return tuple(found) or _contradictions(checkpoint.storage, listing, files)


def _keys(listing: Listing) -> dict[str, list[str]]:
    """Return the tensors that the index lists, by file."""
    found: dict[str, list[str]] = {}
    for key, file in (listing.weight_map or {}).items():
        found.setdefault(file, []).append(key)
    return found


def _contradictions(storage: Storage, listing: Listing, files: list[WeightFile]) -> tuple[Damage, ...]:
    """Return where an index and sound files contradict each other."""
    try:
        contents(listing, files)
    except CheckpointingException as error:
        return (Damage(listing.name, str(error)),)
    lacking = absent(listing, files)
    if lacking and are_tied(storage, lacking, [entry.name for file in files for entry in file.entries]):
        return ()  # it is named with what isn't taken; total_size may count it or not
    if lacking:
        why = "tensors that it lists aren't in their files, as where a tied one isn't stored twice"
        return (Damage(listing.name, why, keys=tuple(sorted(lacking))),)
    if listing.weight_map is None or listing.total_size is None:
        return ()
    entries = (entry for file in files for entry in file.entries if listing.weight_map.get(entry.name) == file.name)
    total = sum(entry.stop - entry.start for entry in entries)
    if total == listing.total_size:
        return ()
    return (Damage(listing.name, f"total_size is {listing.total_size}, the tensors have {total} bytes"),)

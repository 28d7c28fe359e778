"""Checking a Hugging Face model as far as its format allows: lengths, headers and what the index says."""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import CheckpointingException
from .._findings import Damage, Finding, Unchecked
from .._metadata import METADATA_FILE
from .._values import Checkpoint
from ..base import StrategyAction, register_default_strategy
from ._contents import contents
from ._header import WeightFile, read_header
from ._listing import Listing, read_listing
from ._names import BACKEND, VERSION, find_weights

_WHY = "this format carries no checksums: lengths, headers and the index are compared"


@register_default_strategy(StrategyAction.VERIFY, BACKEND, VERSION)
def verify_files(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """Return what is wrong with a model's files, each looked at, and that none of their bytes has a checksum.

    A changed value isn't found: a file's length, its header, and whether the index fits the files are all that can be
    checked.
    """
    try:
        listing = read_listing(checkpoint)
    except CheckpointingException as error:
        return (Damage(find_weights(checkpoint.storage) or "", str(error)),)
    return (*_damage(checkpoint, listing), *_unchecked(checkpoint, listing))


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
    return tuple(found) or _contradictions(listing, files)


def _keys(listing: Listing) -> dict[str, list[str]]:
    """Return the tensors that the index lists, by file."""
    found: dict[str, list[str]] = {}
    for key, file in (listing.weight_map or {}).items():
        found.setdefault(file, []).append(key)
    return found


def _contradictions(listing: Listing, files: list[WeightFile]) -> tuple[Damage, ...]:
    """Return where an index and sound files contradict each other."""
    try:
        contents(listing, files)
    except CheckpointingException as error:
        return (Damage(listing.name, str(error)),)
    if listing.weight_map is None or listing.total_size is None:
        return ()
    entries = (entry for file in files for entry in file.entries if listing.weight_map.get(entry.name) == file.name)
    total = sum(entry.stop - entry.start for entry in entries)
    if total == listing.total_size:
        return ()
    return (Damage(listing.name, f"total_size is {listing.total_size}, the tensors have {total} bytes"),)

"""Offsets of payloads (tensors' bytes) in data files: they are looked up in the archives before a load can read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ...errors import CorruptCheckpoint, UnsafeFile, UnsupportedValue, error_text
from ...kit import (
    Buffer,
    Checkpoint,
    Column,
    LoadOptions,
    Reader,
    can,
    dtype_name,
    fetch_ahead,
    in_threads,
    opened,
    threads_of,
)
from ..archives import StoredTensor, archive_ends, tensor_place
from ..manifest import check_listed
from ..torch import decode_with_holes
from ._listing import ArchiveListing, read_listing

_UNKNOWN, SCATTERED = -1, -2
"""Placeholders for the offset of a payload that isn't looked up yet, and of one that isn't in row-major order."""


@dataclass(frozen=True, slots=True, eq=False)
class Payloads:
    """Offsets and checksums of a checkpoint's payloads, which are filled in as archives are looked up.

    Attributes:
        begin: Offset of each payload in its file, `SCATTERED` if it isn't one row-major record, int64 (archives,).
        crc32: CRC32 of each payload, 0 if none is recorded, int64 (archives,).
        lengths: Length in bytes of each file in which archives were looked up.
        places: Strided layout of each tensor that isn't in row-major order, by the archive's number.
    """

    begin: Column
    crc32: Column
    lengths: dict[int, int]
    places: dict[int, StoredTensor]


def payloads_of(checkpoint: Checkpoint, listing: ArchiveListing, numbers: Column) -> Payloads:
    """Look up the given archives, and return the payloads of all archives that were looked up so far.

    Raises:
        CorruptCheckpoint: An archive is missing, or holds another tensor than `.metadata` says.
        UnsupportedValue: An archive is compressed, or in another format.
    """
    payloads = checkpoint.once(_none_yet)  # It keeps the results of earlier calls.
    new_numbers = numbers[payloads.begin[numbers] == _UNKNOWN]
    check_readable(listing, new_numbers)
    archives = listing.archives
    storage = checkpoint.storage

    def look_up(file: int) -> None:
        inside = new_numbers[archives.file[new_numbers] == file].tolist()
        with open_data_file(checkpoint, listing, file, inside) as reader:
            payloads.lengths[file] = reader.length
            for at, number in enumerate(inside):
                if at % _LOOKED_UP == 0:
                    fetch_ahead(reader, ends_of(listing, inside[at : at + _LOOKED_UP]))
                place = _look_up(checkpoint, listing, reader, number)
                if place is not None and place.fills_record:
                    payloads.begin[number], payloads.crc32[number] = place.begin, place.record.crc32
                    continue
                payloads.begin[number] = SCATTERED
                if place is not None:
                    payloads.places[number] = place

    # Several files are read at a time only if reads are requests that wait: others would only share Python's lock.
    in_threads(look_up, np.unique(archives.file[new_numbers]).tolist(), threads_of(storage, None) or 1)
    return payloads


_LOOKED_UP = 4096
"""Upper bound of the archives whose ends are in memory at a time."""


def ends_of(listing: ArchiveListing, numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges, as ``(begin, end)``, of the given archives' headers and directories in a file.

    An archive has its header at the start and its directory at the end: these are two ranges, or one if they meet.
    """
    for number in numbers:
        byte = int(listing.archives.byte[number])
        yield from ((byte + begin, byte + end) for begin, end in archive_ends(int(listing.archives.length[number])))


def batches(listing: ArchiveListing, numbers: Iterable[int]) -> Iterator[list[int]]:
    """Yield the numbers of one file's archives in batches that are small enough to be in memory."""
    batch: list[int] = []
    size = 0
    for number in numbers:
        batch.append(number)
        size += int(listing.archives.length[number])
        if size >= _BATCH_BYTES or len(batch) == _BATCH_ARCHIVES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


_BATCH_BYTES, _BATCH_ARCHIVES = 16 * 1024 * 1024, 512


def wholes_of(listing: ArchiveListing, numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the byte range of each archive in its file, as ``(begin, end)``, given the archives' numbers."""
    for number in numbers:
        byte = int(listing.archives.byte[number])
        yield byte, byte + int(listing.archives.length[number])


def check_readable(listing: ArchiveListing, numbers: Column) -> None:
    """Raise if any of the requested archives can't be read.

    Raises:
        UnsupportedValue: An archive is compressed, or in another format.
    """
    # Only requested archives raise an error: other tensors of the checkpoint still load.
    if not listing.archives.refusals:
        return
    names, refusals = listing.archives.names, listing.archives.refusals
    reasons = {f"{names[number]!r}: {refusals[number]}" for number in numbers.tolist() if number in refusals}
    if reasons:
        fix = "Load this checkpoint with torch.distributed.checkpoint, and with the extensions that saved it."
        raise UnsupportedValue(error_text("load: unreadable tensors or objects", offenders=sorted(reasons), fix=fix))


def check_reach(checkpoint: Checkpoint, listing: ArchiveListing, file: int, numbers: Sequence[int]) -> int:
    """Return the length of a data file, in bytes, after checking that it is long enough for the given archives.

    Raises:
        CorruptCheckpoint: The file is too short or missing.
    """
    archives, storage = listing.archives, checkpoint.storage
    end = max(int(archives.byte[number] + archives.length[number]) for number in numbers)
    name = archives.files[file]
    # If looking up a length is a request, the length of an earlier read is used.
    known_length = checkpoint.once(_none_yet).lengths.get(file) if can(storage).read_range is not None else None
    length = storage.length(name) if known_length is None else known_length
    if length is None or length < end:
        found = "no such file" if length is None else f"{length} bytes"
        fix = "The checkpoint was damaged, or not all of it was copied; load another one."
        raise CorruptCheckpoint(
            error_text(
                f"load: {storage.where(name)!r} is missing, or shorter than when it was saved",
                found=found,
                expected=f"at least {end} bytes",
                fix=fix,
            )
        )
    return length


@contextmanager
def open_data_file(
    checkpoint: Checkpoint, listing: ArchiveListing, file: int, numbers: Sequence[int]
) -> Iterator[Reader]:
    """Open a data file, after checking that it is long enough for the given archives.

    Raises:
        CorruptCheckpoint: The file is too short or missing.
    """
    length = check_reach(checkpoint, listing, file, numbers)
    name = listing.archives.files[file]
    # Only this option checks the SHA-256, which takes a pass over the whole file.
    if checkpoint.options.verify == "all":
        check_listed(checkpoint, name)
    with opened(checkpoint.storage, name, length) as reader:
        yield reader


def archive_name(checkpoint: Checkpoint, listing: ArchiveListing, number: int) -> str:
    """Return an archive's name, file and offset, for the headings of errors."""
    archives = listing.archives
    path = checkpoint.storage.where(archives.files[archives.file[number]])
    return f"load: {archives.names[number]!r} in {path!r}, at byte {archives.byte[number]}"


def part_of(reader: Reader, byte: int, begin: int, end: int) -> Buffer:
    """Return a byte range of the archive that begins at offset `byte` of a file."""
    return reader.read(byte + begin, byte + end)


def _none_yet(checkpoint: Checkpoint) -> Payloads:
    count = len(read_listing(checkpoint).archives.names)
    return Payloads(np.full(count, _UNKNOWN, dtype=np.int64), np.zeros(count, dtype=np.int64), {}, {})


def _look_up(checkpoint: Checkpoint, listing: ArchiveListing, reader: Reader, number: int) -> StoredTensor | None:
    """Return the description of an archive's tensor; None if the archive must be decoded whole."""
    archives = listing.archives
    byte, length = int(archives.byte[number]), int(archives.length[number])
    what = archive_name(checkpoint, listing, number)
    try:
        place = tensor_place(partial(part_of, reader, byte), length, what=what)
    except (CorruptCheckpoint, UnsafeFile):
        # The archive isn't in the usual form: decoding it handles more kinds of tensors, or raises the right error.
        return None
    check_kind(listing, number, dtype_name(place.dtype), tuple(place.shape), what)
    record = replace(place.record, begin=byte + place.record.begin)
    return replace(place, file=archives.files[archives.file[number]], begin=byte + place.begin, record=record)


def check_tensor(listing: ArchiveListing, number: int, value: Any, what: str) -> torch.Tensor:
    """Return an archive's value, after checking that it is the tensor that `.metadata` lists.

    Raises:
        CorruptCheckpoint: The value isn't a tensor, or has another dtype or shape.
    """
    if not isinstance(value, torch.Tensor):
        type_name = type(value).__name__
        raise CorruptCheckpoint(error_text(f"{what}: not a tensor", found=type_name, fix="Load another checkpoint."))
    check_kind(listing, number, dtype_name(value.dtype), tuple(value.shape), what)
    return value


def check_kind(listing: ArchiveListing, number: int, dtype: str, shape: tuple[int, ...], what: str) -> None:
    """Raise unless an archive's tensor is the one that `.metadata` lists.

    Raises:
        CorruptCheckpoint: The tensor has another dtype or shape.
    """
    # `.metadata` has no checksum, so that comparing archives with it is the only check of its numbers.
    expected = listing.contents.tensors[listing.archives.names[number]].dtype
    expected_name = "" if expected is None else dtype_name(expected)
    if (dtype, shape) != (expected_name, listing.archives.shape(number)):
        raise CorruptCheckpoint(
            error_text(
                f"{what}: not the tensor that .metadata lists",
                found=f"{shape} {dtype}",
                expected=f"{listing.archives.shape(number)} {expected_name}",
                fix="The checkpoint was damaged; load another one.",
            )
        )


# This section decodes archives whole: objects, plain values, and tensors whose payload isn't in row-major order.


Decode = Callable[[Buffer, str, LoadOptions], Any]
"""Function that returns an archive's value from its bytes, its description for errors, and the options."""


def decoded_at(
    checkpoint: Checkpoint, listing: ArchiveListing, reader: Reader, number: int, decode: Decode = decode_with_holes
) -> Any:
    """Return the decoded value of an archive in an open file.

    Raises:
        CorruptCheckpoint: The archive isn't what was saved.
        UnsafeFile: The value needs unpickling, and `allow_pickle` is False.
    """
    archives = listing.archives
    data = part_of(reader, int(archives.byte[number]), 0, int(archives.length[number]))
    what = archive_name(checkpoint, listing, number)
    return decode(data, what, checkpoint.options)


def decoded(
    checkpoint: Checkpoint, listing: ArchiveListing, numbers: Sequence[int], decode: Decode = decode_with_holes
) -> Iterator[tuple[int, Any]]:
    """Yield the number and the decoded value of each archive, file by file.

    Args:
        checkpoint: The open checkpoint.
        listing: Listing of the checkpoint.
        numbers: Numbers of the archives.
        decode: Function that decodes an archive.

    Raises:
        CorruptCheckpoint: An archive isn't what was saved.
        UnsafeFile: Reading an archive would run pickled code, and `allow_pickle` isn't given.
    """
    unique_numbers = np.unique(np.array(numbers, dtype=np.int64))
    check_readable(listing, unique_numbers)
    files = listing.archives.file[unique_numbers]
    for file in np.unique(files).tolist():
        inside = unique_numbers[files == file].tolist()
        with open_data_file(checkpoint, listing, file, inside) as reader:
            for batch in batches(listing, inside):
                fetch_ahead(reader, wholes_of(listing, batch))
                for number in batch:
                    yield number, decoded_at(checkpoint, listing, reader, number, decode)

"""Checking one archive: the CRC32 of each of its records, and whether it holds what `.metadata` says."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from ...codec import archive_records, decode_archive, dtype_name, tensor_place
from ...errors import CheckpointingException, CorruptCheckpoint, UnsafeFile, UnsupportedValue
from ...storage import Reader, read_crc32
from .._values import Checkpoint
from ._listing import Listing
from ._payloads import archive_name, check_kind, check_tensor, part_of

_LARGE_BYTES = 64 * 1024 * 1024
"""A record of more bytes is left to several threads."""

_DECODED_BYTES = 16 * 1024 * 1024
"""An archive of more isn't taken into memory to look at what it holds: its records' checksums have to do."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A record that is yet to be read.

    Attributes:
        file: number of the file.
        number: of the archive.
        begin: its first byte in the file.
        end: one past its last byte.
        crc32: that was recorded.
        what: what to say if it has another one.
    """

    file: int
    number: int
    begin: int
    end: int
    crc32: int
    what: str


@dataclass(frozen=True, slots=True, eq=False)
class ArchiveCheck:
    """What is known of one archive.

    Attributes:
        wrong: what is wrong with it, and from which byte of the file up to which.
        compared: the stretches of the file that a CRC32 was recorded of.
        large: those of them that are yet to be read.
    """

    wrong: list[tuple[str, int, int]] = field(default_factory=list)
    compared: list[tuple[int, int]] = field(default_factory=list)
    large: list[Stretch] = field(default_factory=list)


def check_archive(checkpoint: Checkpoint, listing: Listing, reader: Reader, number: int) -> ArchiveCheck:
    """Return what is known of one archive of an open file."""
    archives, found = listing.archives, ArchiveCheck()
    if number in archives.refused:
        return found
    begin, length = int(archives.byte[number]), int(archives.length[number])
    what = archive_name(checkpoint, listing, number)
    try:
        _check_records(listing, reader, number, what, found)
        if not found.wrong:
            _check_value(checkpoint, listing, reader, number, what)
    except (UnsafeFile, UnsupportedValue):
        pass  # what it holds may be as it was saved: it just isn't read here
    except CheckpointingException as error:
        found.wrong.append((str(error), begin, begin + length))
    return found


def _check_records(listing: Listing, reader: Reader, number: int, what: str, found: ArchiveCheck) -> None:
    archives = listing.archives
    byte, length, file = int(archives.byte[number]), int(archives.length[number]), int(archives.file[number])
    try:
        records = archive_records(partial(part_of, reader, byte), length, what=what)
    except CorruptCheckpoint:
        return  # whoever decodes it says what is wrong, or that torch wrote it in another form
    for record in records:
        begin, end = byte + record.begin, byte + record.begin + record.nbytes
        wrong = f"the CRC32 of record {record.name[:100]!r} of an archive differs"
        if not record.crc32:
            continue  # none was recorded
        found.compared.append((begin, end))
        if record.nbytes > _LARGE_BYTES:
            found.large.append(Stretch(file, number, begin, end, record.crc32, wrong))
        elif read_crc32(reader, begin, end) != record.crc32:
            found.wrong.append((wrong, begin, end))


def _check_value(checkpoint: Checkpoint, listing: Listing, reader: Reader, number: int, what: str) -> None:
    """Raise unless an archive holds what `.metadata` says."""
    archives, is_tensor = listing.archives, listing.archives.shapes[number] is not None
    byte, length = int(archives.byte[number]), int(archives.length[number])
    if is_tensor:
        try:
            place = tensor_place(partial(part_of, reader, byte), length, what=what)
        except (CorruptCheckpoint, UnsafeFile):
            pass  # whoever decodes it as a whole knows more kinds of tensors
        else:
            check_kind(listing, number, dtype_name(place.dtype), tuple(place.shape), what)
            return
    if length <= _DECODED_BYTES:
        value = decode_archive(part_of(reader, byte, 0, length), what=what, types=checkpoint.options.types)
        if is_tensor:
            check_tensor(listing, number, value, what)

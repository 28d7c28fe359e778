"""The zips of torch.save, without compression: reading the directory, and writing records byte for byte as it does."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct, pack
from typing import Any

from ...errors import CorruptCheckpoint, error_text

# Reading a zip's directory. Not by zipfile, which trusts it: records that overlap, or of which header and directory say
# different things, would make a small file large, or look different to different readers.

Read = Callable[[int, int], Any]
"""(begin, end) -> these bytes of an archive."""

END = Struct("<4s4H2IH")
LOCATOR = Struct("<4sIQI")
END64 = Struct("<4sQ2H2I4Q")
ENTRY = Struct("<4s6H3I5H2I")
LOCAL = Struct("<4s5H3I2H")
_U16_PAIR = Struct("<HH")
_U64 = Struct("<Q")

_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Record:
    """One entry of an archive.

    Attributes:
        name: in the archive, with the folder that all records are in.
        crc32: of its bytes; 0 if none was recorded.
        begin: the byte of the archive where its bytes begin, after its header.
        nbytes: its length.
    """

    name: str
    crc32: int
    begin: int
    nbytes: int


def read_directory(read: Read, length: int, what: str) -> tuple[Record, ...]:
    """Return an archive's records, in the order of their bytes.

    Args:
        read: returns a byte range of the archive.
        length: of the archive, in bytes.
        what: the archive, for messages.

    Raises:
        CorruptCheckpoint: it isn't a zip, or a record in it is compressed, encrypted, overlaps another one or ends
            beyond the archive.
    """
    try:
        count, begin, end = _directory_extent(read, length)
        entries = _entries(bytes(read(begin, end)), count)
        records = [_record_at(read, entry, begin) for entry in sorted(entries, key=lambda entry: entry[-1])]
        for first, second in pairwise([*records, Record("the directory", 0, begin, 0)]):
            if first.begin + first.nbytes > second.begin:
                raise ValueError(f"{first.name!r} and {second.name!r} overlap")
    except (ValueError, IndexError) as error:
        raise CorruptCheckpoint(error_text(f"{what}: not an archive of torch.save", found=str(error)[:200])) from error
    return tuple(records)


def _unpack(struct: Struct, data: Any, at: int, signature: bytes, name: str) -> tuple[Any, ...]:
    if at < 0 or at + struct.size > len(data):
        raise ValueError(f"{name} is cut off")
    fields = struct.unpack_from(data, at)
    if fields[0] != signature:
        raise ValueError(f"no {name} where it should be")
    return fields


def _directory_extent(read: Read, length: int) -> tuple[int, int, int]:
    """Return how many entries the directory has, and where it begins and ends."""
    # At its very end, never searched for: torch writes no comment, and a search could find a planted directory.
    last = length - END.size
    if last < 0:
        raise ValueError("it is shorter than the end of a zip")
    *_, count, size, begin, comment = _unpack(END, read(last, length), 0, b"PK\5\6", "end of a zip's directory")
    if comment:
        raise ValueError("a comment after the directory")
    place = last - LOCATOR.size
    if place >= END64.size and bytes(read(place, place + 4)) == b"PK\6\7":
        last = place - END64.size
        *_, count, size, begin = _unpack(END64, read(last, place), 0, b"PK\6\6", "end of a large zip's directory")
    elif count == _FULL16 or size == _FULL32 or begin == _FULL32:
        raise ValueError("a large zip's directory without its locator")
    if begin + size != last:
        raise ValueError("the directory isn't where the zip ends; something was put before or behind it")
    if count * ENTRY.size > size:  # before the loop over the entries, whose number the file chooses
        raise ValueError("a directory that is too short for its entries")
    return count, begin, begin + size


Entry = tuple[str, int, int, int]
"""Name, CRC32, length, and where the local header is."""


def _entries(data: bytes, count: int) -> list[Entry]:
    entries, at = [], 0
    for _ in range(count):
        entry, at = _entry(data, at)
        entries.append(entry)
    return entries


def _entry(data: bytes, at: int) -> tuple[Entry, int]:
    fields = _unpack(ENTRY, data, at, b"PK\1\2", "entry of the directory")
    _, _, _, flags, method, _, _, crc32, packed, nbytes, name_length, extra_length, comment_length = fields[:13]
    begin = fields[-1]
    start = at + ENTRY.size
    end = start + name_length + extra_length + comment_length
    if end > len(data):
        raise ValueError("an entry of the directory is cut off")
    name = data[start : start + name_length].decode("utf-8")
    if flags & 0x2041 or method:  # bits 0, 6 and 13: encryption
        raise ValueError(f"{name!r} is compressed or encrypted")
    extra = data[start + name_length : start + name_length + extra_length]
    nbytes, packed, begin = _zip64_values([nbytes, packed, begin], extra)
    if nbytes != packed:
        raise ValueError(f"{name!r} has two different lengths")
    return (name, crc32, nbytes, begin), end


def _zip64_values(fields: list[int], extra: bytes) -> list[int]:
    """Return the fields, with those that don't fit 32 bits taken from zip64's extra field."""
    # The extra field has only those values, in this order, whose 32-bit field is full.
    if _FULL32 not in fields:
        return fields
    values = _find_zip64(extra)
    wide = []
    for field in fields:
        if field == _FULL32:
            (field,), values = _U64.unpack(values[:8].ljust(8, b"\xff")), values[8:]
        wide.append(field)
    return wide


def _find_zip64(extra: bytes) -> bytes:
    at = 0
    while at + 4 <= len(extra):
        kind, size = _U16_PAIR.unpack_from(extra, at)
        if kind == 1:
            return extra[at + 4 : at + 4 + size]
        at += 4 + size
    raise ValueError("a length of over 32 bits without zip64's extra field")


def _record_at(read: Read, entry: Entry, directory: int) -> Record:
    """Return the record of an entry, whose bytes follow its local header."""
    # The header is read too: its name and extra field can have other lengths than in the directory, and torch pads the
    # extra field so that the bytes are aligned.
    name, crc32, nbytes, at = entry
    if at + LOCAL.size > directory:
        raise ValueError(f"{name!r} begins after the archive's records")
    header = _unpack(LOCAL, read(at, at + LOCAL.size), 0, b"PK\3\4", "header of a record")
    _, _, flags, method, *_, name_length, extra_length = header
    begin = at + LOCAL.size + name_length + extra_length
    if flags & 0x2041 or method:
        raise ValueError(f"{name!r} is compressed or encrypted")
    if begin + nbytes > directory:
        raise ValueError(f"{name!r} ends after the archive's records")
    if bytes(read(at + LOCAL.size, at + LOCAL.size + name_length)) != name.encode("utf-8"):
        raise ValueError(f"{name!r} has two different names")
    return Record(name, crc32, begin, nbytes)


# Writing records and directory.

ALIGNMENT = 64
"""A record's bytes begin at a multiple of this, so that they are tensors where they lie."""

_FULL = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class WrittenRecord:
    """A record that was written, for the directory.

    Attributes:
        name: in the archive.
        crc32: of its bytes.
        nbytes: its length.
        at: the byte of the archive where its header begins.
    """

    name: str
    crc32: int
    nbytes: int
    at: int


def append(out: bytearray, start: int, records: list[WrittenRecord], name: str, data: bytes | memoryview) -> None:
    """Append a record, with header and descriptor, to an archive.

    Args:
        out: bytes of the archive; extended in place.
        start: the byte of the archive where `out` begins.
        records: those written before; the new one is added.
        name: without the archive's folder.
        data: the record's bytes.
    """
    record = WrittenRecord(f"archive/{name}", zlib.crc32(data), len(data), start + len(out))
    records.append(record)
    out += local_header(record)
    out += data
    out += descriptor(record)


def local_header(record: WrittenRecord) -> bytes:
    """Return the header before a record's bytes, padded so that they begin at a multiple of `ALIGNMENT`."""
    # Lengths and CRC32 are 0 here, and flag 3 says that they follow in a descriptor, as in torch's own archives.
    name = record.name.encode()
    extra = _zip64_field(record)
    begin = record.at + LOCAL.size + len(name) + len(extra) + 4
    padding = -begin % ALIGNMENT
    extra += pack("<2sH", b"FB", padding) + b"Z" * padding
    return LOCAL.pack(b"PK\3\4", 0, 0x808, 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra


def descriptor(record: WrittenRecord) -> bytes:
    """Return the descriptor after a record's bytes: CRC32 and lengths."""
    form = "<4sIQQ" if _zip64_field(record) else "<4sIII"
    return pack(form, b"PK\7\b", record.crc32, record.nbytes, record.nbytes)


def _directory_entry(record: WrittenRecord) -> bytes:
    name, extra = record.name.encode(), _zip64_field(record)
    length, at = min(record.nbytes, _FULL), min(record.at, _FULL)
    lengths = (record.crc32, length, length, len(name), len(extra), 0, 0, 0, 0, at)
    return ENTRY.pack(b"PK\1\2", 0, 0, 0x808, 0, 0, 0, *lengths) + name + extra


def directory(records: Sequence[WrittenRecord], at: int) -> bytes:
    """Return the end of an archive: the directory of its records, which begins at byte `at`, and its locators."""
    # With zip64's locator even where 32 bits are enough, as torch writes it.
    entries = b"".join(_directory_entry(record) for record in records)
    count, size = len(records), len(entries)
    end64 = END64.pack(b"PK\6\6", 44, 0x031E, 45, 0, 0, count, count, size, at)
    locator = LOCATOR.pack(b"PK\6\7", 0, at + size, 1)
    end = END.pack(b"PK\5\6", 0, 0, min(count, 0xFFFF), min(count, 0xFFFF), min(size, _FULL), min(at, _FULL), 0)
    return entries + end64 + locator + end


def _zip64_field(record: WrittenRecord) -> bytes:
    """Return zip64's extra field with the values that don't fit 32 bits, empty if all do."""
    wide = [record.nbytes, record.nbytes] if record.nbytes >= _FULL else []
    wide += [record.at] if record.at >= _FULL else []
    return pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""

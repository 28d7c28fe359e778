"""A zip's directory and records, read and written byte for byte as torch.save's are: entries are stored as they are."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct, pack
from typing import Any

from ...errors import CorruptCheckpoint, error_text

# The directory of a zip whose entries are stored as they are: which record is where.

Read = Callable[[int, int], Any]
"""(begin, end) -> the bytes of that stretch of an archive."""

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
        name: in the archive, without the folder that all records are in.
        crc32: of its bytes; 0 where none was recorded.
        begin: the byte of the archive where its own begin.
        nbytes: how many there are.
    """

    name: str
    crc32: int
    begin: int
    nbytes: int


def read_directory(read: Read, length: int, what: str) -> tuple[Record, ...]:
    """Return an archive's records, in the order of their bytes.

    Args:
        read: gives a stretch of the archive.
        length: the archive's, in bytes.
        what: the archive, for messages.

    Raises:
        CorruptCheckpoint: it is no zip, or a record in it is compressed, encrypted, overlaps another one or ends
            beyond the archive.
    """
    try:
        count, begin, end = _extent(read, length)
        entries = _entries(bytes(read(begin, end)), count)
        records = [_located(read, entry, begin) for entry in sorted(entries, key=lambda entry: entry[-1])]
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


def _extent(read: Read, length: int) -> tuple[int, int, int]:
    """Return how many entries the directory has, and where it begins and ends."""
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
        raise ValueError("no locator of a large zip's directory")
    if begin + size != last:
        raise ValueError("the directory isn't where the zip ends; something was put before or behind it")
    if count * ENTRY.size > size:
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
    if flags & 0x2041 or method:
        raise ValueError(f"{name!r} is compressed or encrypted")
    extra = data[start + name_length : start + name_length + extra_length]
    nbytes, packed, begin = _wide([nbytes, packed, begin], extra)
    if nbytes != packed:
        raise ValueError(f"{name!r} has two lengths")
    return (name, crc32, nbytes, begin), end


def _wide(fields: list[int], extra: bytes) -> list[int]:
    """Return the fields, those that don't fit 32 bits from the extra field that zip64 has for them."""
    if _FULL32 not in fields:
        return fields
    values = _zip64(extra)
    wide = []
    for field in fields:
        if field == _FULL32:
            (field,), values = _U64.unpack(values[:8].ljust(8, b"\xff")), values[8:]
        wide.append(field)
    return wide


def _zip64(extra: bytes) -> bytes:
    at = 0
    while at + 4 <= len(extra):
        kind, size = _U16_PAIR.unpack_from(extra, at)
        if kind == 1:
            return extra[at + 4 : at + 4 + size]
        at += 4 + size
    raise ValueError("a length over 32 bits that is nowhere")


def _located(read: Read, entry: Entry, directory: int) -> Record:
    """Return an entry as a record, its bytes found behind its local header."""
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
        raise ValueError(f"{name!r} has two names")
    return Record(name, crc32, begin, nbytes)


# Records and directory of a zip, written byte for byte as torch.save's are.

ALIGNMENT = 64
"""A record's bytes begin at a multiple of it."""

_FULL = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Written:
    """A record in the directory.

    Attributes:
        name: in the archive.
        crc32: of its bytes.
        nbytes: how many there are.
        at: the byte where its header begins.
    """

    name: str
    crc32: int
    nbytes: int
    at: int


def append(out: bytearray, start: int, records: list[Written], name: str, data: bytes | memoryview) -> None:
    """Write a record, with header and descriptor, and note it down.

    Args:
        out: what is written of the archive.
        start: the byte of the archive where `out` begins.
        records: those that are written; the new one is added.
        name: without the archive's folder.
        data: the record's bytes.
    """
    record = Written(f"archive/{name}", zlib.crc32(data), len(data), start + len(out))
    records.append(record)
    out += local_header(record)
    out += data
    out += descriptor(record)


def local_header(record: Written) -> bytes:
    """Return what comes before a record's bytes; pads so that they begin at a multiple of `ALIGNMENT`."""
    name = record.name.encode()
    extra = _wide_fields(record)
    begin = record.at + LOCAL.size + len(name) + len(extra) + 4
    padding = -begin % ALIGNMENT
    extra += pack("<2sH", b"FB", padding) + b"Z" * padding
    return LOCAL.pack(b"PK\3\4", 0, 0x808, 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra


def descriptor(record: Written) -> bytes:
    """Return what comes after a record's bytes."""
    form = "<4sIQQ" if _wide_fields(record) else "<4sIII"
    return pack(form, b"PK\7\b", record.crc32, record.nbytes, record.nbytes)


def _directory_entry(record: Written) -> bytes:
    name, extra = record.name.encode(), _wide_fields(record)
    length, at = min(record.nbytes, _FULL), min(record.at, _FULL)
    lengths = (record.crc32, length, length, len(name), len(extra), 0, 0, 0, 0, at)
    return ENTRY.pack(b"PK\1\2", 0, 0, 0x808, 0, 0, 0, *lengths) + name + extra


def directory(records: Sequence[Written], at: int) -> bytes:
    """Return the end of an archive: the directory of its records, which begins at byte `at`, and where to find it."""
    entries = b"".join(_directory_entry(record) for record in records)
    count, size = len(records), len(entries)
    end64 = END64.pack(b"PK\6\6", 44, 0x031E, 45, 0, 0, count, count, size, at)
    locator = LOCATOR.pack(b"PK\6\7", 0, at + size, 1)
    end = END.pack(b"PK\5\6", 0, 0, min(count, 0xFFFF), min(count, 0xFFFF), min(size, _FULL), min(at, _FULL), 0)
    return entries + end64 + locator + end


def _wide_fields(record: Written) -> bytes:
    """Return zip64's extra field with what doesn't fit 32 bits, empty where all does."""
    wide = [record.nbytes, record.nbytes] if record.nbytes >= _FULL else []
    wide += [record.at] if record.at >= _FULL else []
    return pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""

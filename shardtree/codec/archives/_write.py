"""Records and directory of a zip, written byte for byte as torch.save's are."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from struct import pack

from ._directory import END, END64, ENTRY, LOCAL, LOCATOR

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

"""Uncompressed zips of torch.save: a reader that checks their records, and a writer of the same zips, byte for byte."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct, pack
from typing import Any

from ...errors import CheckpointingException, CorruptCheckpoint, UnsafeFile, error_text

# This section reads a zip's directory. It doesn't use zipfile, which trusts the directory: overlapping records would
# make a small file large, and records whose header contradicts the directory would differ between readers.

Read = Callable[[int, int], Any]
"""Function that returns a byte range of an archive, by its first byte and one past its last."""

_END = Struct("<4s4H2IH")
_LOCATOR = Struct("<4sIQI")
_END64 = Struct("<4sQ2H2I4Q")
_ENTRY = Struct("<4s6H3I5H2I")
_LOCAL = Struct("<4s5H3I2H")
_U16_PAIR = Struct("<HH")
_U64 = Struct("<Q")

_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Record:
    """One entry of an archive.

    Attributes:
        name: Name in the archive, with the folder that all records share.
        crc32: CRC32 of its bytes; 0 if none was recorded.
        begin: Offset of its bytes in the archive, after its header.
        nbytes: Length in bytes.
    """

    name: str
    crc32: int
    begin: int
    nbytes: int


def read_directory(read: Read, length: int, what: str) -> tuple[Record, ...]:
    """Return an archive's records, in the order of their bytes.

    Args:
        read: Function that returns a byte range of the archive.
        length: Length of the archive in bytes.
        what: Description of the archive, for errors.

    Raises:
        CorruptCheckpoint: The bytes aren't a zip, or a record is compressed, encrypted, overlaps another one or ends
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
    """Return the count of the directory's entries, the offset of its first byte, and one past its last byte."""
    # The directory must be at the very end: torch writes no comment, and a search could find a planted directory.
    last = length - _END.size
    if last < 0:
        raise ValueError("it is shorter than the end of a zip")
    *_, count, size, begin, comment = _unpack(_END, read(last, length), 0, b"PK\5\6", "end of a zip's directory")
    if comment:
        raise ValueError("a comment after the directory")
    place = last - _LOCATOR.size
    if place >= _END64.size and bytes(read(place, place + 4)) == b"PK\6\7":
        last = place - _END64.size
        *_, count, size, begin = _unpack(_END64, read(last, place), 0, b"PK\6\6", "end of a large zip's directory")
    elif count == _FULL16 or size == _FULL32 or begin == _FULL32:
        raise ValueError("a large zip's directory without its locator")
    if begin + size != last:
        raise ValueError("the directory is not at the zip's end; bytes were inserted before or after it")
    if count * _ENTRY.size > size:  # This comes before the loop over the entries, whose number the file chooses.
        raise ValueError("a directory that is too short for its entries")
    return count, begin, begin + size


Entry = tuple[str, int, int, int]
"""Name, CRC32, length, and offset of the local header."""


def _entries(data: bytes, count: int) -> list[Entry]:
    entries, at = [], 0
    for _ in range(count):
        entry, at = _entry(data, at)
        entries.append(entry)
    return entries


def _entry(data: bytes, at: int) -> tuple[Entry, int]:
    fields = _unpack(_ENTRY, data, at, b"PK\1\2", "entry of the directory")
    _, _, _, flags, method, _, _, crc32, packed_nbytes, nbytes, name_length, extra_length, comment_length = fields[:13]
    begin = fields[-1]
    start = at + _ENTRY.size
    end = start + name_length + extra_length + comment_length
    if end > len(data):
        raise ValueError("an entry of the directory is cut off")
    name = data[start : start + name_length].decode("utf-8")
    if flags & 0x2041 or method:  # Bits 0, 6 and 13 mean encryption.
        raise ValueError(f"{name!r} is compressed or encrypted")
    extra = data[start + name_length : start + name_length + extra_length]
    nbytes, packed_nbytes, begin = _zip64_values([nbytes, packed_nbytes, begin], extra)
    if nbytes != packed_nbytes:
        raise ValueError(f"{name!r} has two different lengths")
    return (name, crc32, nbytes, begin), end


def _zip64_values(fields: list[int], extra: bytes) -> list[int]:
    """Return an entry's lengths and offset; those that do not fit 32 bits are taken from zip64's extra field."""
    # The extra field has only the values whose 32-bit field is full, in this order.
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
    """Return the record of a directory entry, after reading the header in front of the record's bytes.

    Args:
        read: Function that returns a byte range of the archive.
        entry: Entry of the directory.
        directory: Offset of the directory.
    """
    # The header's extra field can have another length than the directory's, since torch pads it to align the bytes.
    name, crc32, nbytes, at = entry
    if at + _LOCAL.size > directory:
        raise ValueError(f"{name!r} begins after the archive's records")
    header = _unpack(_LOCAL, read(at, at + _LOCAL.size), 0, b"PK\3\4", "header of a record")
    _, _, flags, method, *_, name_length, extra_length = header
    begin = at + _LOCAL.size + name_length + extra_length
    if flags & 0x2041 or method:
        raise ValueError(f"{name!r} is compressed or encrypted")
    if begin + nbytes > directory:
        raise ValueError(f"{name!r} ends after the archive's records")
    if bytes(read(at + _LOCAL.size, at + _LOCAL.size + name_length)) != name.encode("utf-8"):
        raise ValueError(f"{name!r} has two different names")
    return Record(name, crc32, begin, nbytes)


# This section writes records and the directory.

ALIGNMENT = 64
"""Alignment of a record's bytes in the archive, so that a mapped file can be used as a tensor."""


@dataclass(frozen=True, slots=True)
class WrittenRecord:
    """A record that was written; the directory at the archive's end will list these fields.

    Attributes:
        name: Name in the archive.
        crc32: CRC32 of its bytes.
        nbytes: Length in bytes.
        at: Offset of its header in the archive.
    """

    name: str
    crc32: int
    nbytes: int
    at: int


def append(out: bytearray, start: int, records: list[WrittenRecord], name: str, data: bytes | memoryview) -> None:
    """Append a record, with header and descriptor, to an archive.

    Args:
        out: Bytes of the archive, extended in place.
        start: Offset of `out` in the archive.
        records: List of the records written before; the new one is added.
        name: Name of the record, without the archive's folder.
        data: Bytes of the record.
    """
    record = WrittenRecord(f"archive/{name}", zlib.crc32(data), len(data), start + len(out))
    records.append(record)
    out += local_header(record)
    out += data
    out += descriptor(record)


def local_header(record: WrittenRecord) -> bytes:
    """Return the header before a record's bytes, padded so that they begin at a multiple of `ALIGNMENT`."""
    # Lengths and CRC32 are 0 here; flag 3 says that a descriptor has them, as in torch's archives.
    name = record.name.encode()
    extra = _zip64_field(record)
    begin = record.at + _LOCAL.size + len(name) + len(extra) + 4
    padding = -begin % ALIGNMENT
    extra += pack("<2sH", b"FB", padding) + b"Z" * padding
    return _LOCAL.pack(b"PK\3\4", 0, 0x808, 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra


def descriptor(record: WrittenRecord) -> bytes:
    """Return the descriptor after a record's bytes: CRC32 and lengths."""
    form = "<4sIQQ" if _zip64_field(record) else "<4sIII"
    return pack(form, b"PK\7\b", record.crc32, record.nbytes, record.nbytes)


def _directory_entry(record: WrittenRecord) -> bytes:
    name, extra = record.name.encode(), _zip64_field(record)
    length, at = min(record.nbytes, _FULL32), min(record.at, _FULL32)
    lengths = (record.crc32, length, length, len(name), len(extra), 0, 0, 0, 0, at)
    return _ENTRY.pack(b"PK\1\2", 0, 0, 0x808, 0, 0, 0, *lengths) + name + extra


def directory(records: Sequence[WrittenRecord], at: int) -> bytes:
    """Return the end of an archive: the directory of its records, which begins at offset `at`, and its locators."""
    # zip64's locator is written even if 32 bits suffice, as torch does.
    entries = b"".join(_directory_entry(record) for record in records)
    count, size = len(records), len(entries)
    end64 = _END64.pack(b"PK\6\6", 44, 0x031E, 45, 0, 0, count, count, size, at)
    locator = _LOCATOR.pack(b"PK\6\7", 0, at + size, 1)
    end = _END.pack(b"PK\5\6", 0, 0, min(count, 0xFFFF), min(count, 0xFFFF), min(size, _FULL32), min(at, _FULL32), 0)
    return entries + end64 + locator + end


def _zip64_field(record: WrittenRecord) -> bytes:
    """Return zip64's extra field with the values that don't fit 32 bits, empty if all do."""
    wide = [record.nbytes, record.nbytes] if record.nbytes >= _FULL32 else []
    wide += [record.at] if record.at >= _FULL32 else []
    return pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""


_OLD_MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")  # Files of torch.save began so before it wrote zips.
_TRUST = "Pass options=LoadOptions(allow_pickle=True) if you trust its writer."


@dataclass(frozen=True, slots=True, eq=False)
class Archive:
    """An open archive: its records by name, and a function that reads them.

    Attributes:
        read: Function that returns a byte range of the archive.
        records: Record by name, without the archive's folder.
        what: Description of the archive, for errors.
    """

    read: Read
    records: dict[str, Record]
    what: str

    def data(self, name: str) -> memoryview:
        """Return a record's bytes."""
        record = self.records.get(name)
        if record is None:
            raise CorruptCheckpoint(error_text(f"{self.what}: the archive has no record {name[:100]!r}"))
        return memoryview(self.read(record.begin, record.begin + record.nbytes)).cast("B")

    def checked_data(self, name: str) -> memoryview:
        """Return a record's bytes after checking their CRC32, if one was recorded."""
        # 0 means that no CRC32 was recorded: torch has an option to compute no checksums.
        data = self.data(name)
        crc32, expected = zlib.crc32(data), self.records[name].crc32
        if expected and crc32 != expected:
            fix = "The medium or a later program damaged it; load another checkpoint."
            heading = f"{self.what}: record {name[:100]!r} is not what was saved: its CRC32 differs"
            raise CorruptCheckpoint(error_text(heading, found=f"{crc32:#010x}", expected=f"{expected:#010x}", fix=fix))
        return data


def open_archive(read: Read, length: int, what: str) -> Archive:
    """Read the directory of an archive of torch.save, and check that its tensors are little-endian.

    Raises:
        CorruptCheckpoint: The bytes are not an archive.
        UnsafeFile: Only unpickling can read the file, or it is a TorchScript program.
    """
    if length < 2 or bytes(read(0, 2)) != b"PK":
        raise _not_a_zip(bytes(read(0, min(length, len(_OLD_MAGIC)))), what)
    listing = read_directory(read, length, what)
    # torch names the folder after the file, or "archive": only the pickle in it shows which folder it is.
    pickles = [record.name for record in listing if record.name.rpartition("/")[2] == "data.pkl"]
    folder = min(pickles, key=len, default="").removesuffix("data.pkl")
    records = {record.name.removeprefix(folder): record for record in listing}
    if len(records) < len(listing):
        raise CorruptCheckpoint(error_text(f"{what}: two records of the archive have the same name"))
    if "constants.pkl" in records:
        raise UnsafeFile(error_text(f"{what}: it is a TorchScript program", fix="Load it with torch.jit.load."))
    archive = Archive(read, records, what)
    order = bytes(archive.checked_data("byteorder")) if "byteorder" in records else b"little"
    if order != b"little":
        name = repr(order[:20].decode("ascii", "replace"))
        fix = "On a machine of that byte order, load it with torch and save its tensors in another format."
        raise CorruptCheckpoint(error_text(f"{what}: unsupported byte order", found=name, expected="'little'", fix=fix))
    return archive


def _not_a_zip(begin: bytes, what: str) -> Exception:
    if begin == _OLD_MAGIC:
        found = "a file written by torch before 1.6, or with _use_new_zipfile_serialization=False"
        return UnsafeFile(error_text(f"{what}: only pickle can read torch.save's old format", found=found, fix=_TRUST))
    return CorruptCheckpoint(error_text(f"{what}: not an archive of torch.save", found=f"it begins with {begin[:8]!r}"))


def slices(data: Any) -> Read:
    """Return a `Read` for bytes in memory."""
    view = memoryview(data).cast("B")

    def read(begin: int, end: int) -> memoryview:
        return view[begin:end]

    return read


# This section handles additional records, which torch and other readers ignore.


def add_record(data: bytes, name: str, content: bytes) -> bytes:
    """Return an archive with one more record.

    Args:
        data: Bytes of the archive.
        name: Name of the record, other than those that torch.save uses.
        content: Bytes of the record.

    Examples:
        >>> from shardtree.formats.archives import decode_archive, encode_archive, find_record
        >>> data = add_record(encode_archive({"step": 7}), "note", b"seven")
        >>> decode_archive(data, what="example"), find_record(data, "note", what="example")
        ({'step': 7}, b'seven')
    """
    archive = _open(data, "add_record")
    out, records = bytearray(), list[WrittenRecord]()
    for other in archive.records:
        append(out, 0, records, other, archive.data(other))
    append(out, 0, records, name, content)
    return bytes(out + directory(records, len(out)))


def find_record(data: bytes | bytearray | memoryview, name: str, *, what: str) -> bytes | None:
    """Return the bytes of an archive's record; None if there is no such record, or the bytes aren't an archive.

    Raises:
        CorruptCheckpoint: The CRC32 of the record's bytes differs.
    """
    try:
        archive = _open(data, what)
    except CheckpointingException:
        return None
    return bytes(archive.checked_data(name)) if name in archive.records else None


def _open(data: bytes | bytearray | memoryview, what: str) -> Archive:
    return open_archive(slices(data), memoryview(data).nbytes, what)

"""The records of an archive, checked: the pickle and its storages."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

from ...errors import CheckpointingException, CorruptCheckpoint, UnsafeFile, error_text
from ._zip import Read, Record, WrittenRecord, append, directory, read_directory

_OLD_MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")  # how torch.save's files began before it wrote zips
_TRUST = "Pass options=LoadOptions(allow_pickle=True) if you trust its writer."


@dataclass(frozen=True, slots=True, eq=False)
class Archive:
    """An archive's records by name.

    Attributes:
        read: returns a byte range of the archive.
        records: name without the archive's folder -> record.
        what: the archive, for messages.
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

    def checked(self, name: str) -> memoryview:
        """Return a record's bytes after checking their CRC32, if one was recorded."""
        # 0 means that none was: torch writes that with its option of no checksums.
        data = self.data(name)
        found, expected = zlib.crc32(data), self.records[name].crc32
        if expected and found != expected:
            fix = "The medium or a later program damaged it; load another checkpoint."
            what = f"{self.what}: record {name[:100]!r} isn't what was saved: its CRC32 differs"
            raise CorruptCheckpoint(error_text(what, found=f"{found:#010x}", expected=f"{expected:#010x}", fix=fix))
        return data


def open_archive(read: Read, length: int, what: str) -> Archive:
    """Return the records of an archive that torch.save wrote for tensors of this machine's byte order.

    Raises:
        CorruptCheckpoint: it isn't an archive.
        UnsafeFile: it is in a form that only unpickling can read.
    """
    if length < 2 or bytes(read(0, 2)) != b"PK":
        raise _not_a_zip(bytes(read(0, min(length, len(_OLD_MAGIC)))), what)
    listed = read_directory(read, length, what)
    # torch names the folder after the file, or "archive": so it is found by the pickle in it.
    pickles = [record.name for record in listed if record.name.rpartition("/")[2] == "data.pkl"]
    folder = min(pickles, key=len, default="").removesuffix("data.pkl")
    records = {record.name.removeprefix(folder): record for record in listed}
    if len(records) < len(listed):
        raise CorruptCheckpoint(error_text(f"{what}: two records of the archive have the same name"))
    if "constants.pkl" in records:
        raise UnsafeFile(error_text(f"{what}: it is a TorchScript program", fix="Load it with torch.jit.load."))
    archive = Archive(read, records, what)
    order = bytes(archive.checked("byteorder")) if "byteorder" in records else b"little"
    if order != b"little":
        found = repr(order[:20].decode("ascii", "replace"))
        fix = "On a machine of that byte order, load it with torch and save its tensors in another format."
        raise CorruptCheckpoint(error_text(f"{what}: another byte order", found=found, expected="'little'", fix=fix))
    return archive


def _not_a_zip(begin: bytes, what: str) -> Exception:
    if begin == _OLD_MAGIC:
        old = "torch before 1.6 wrote it, or torch.save with _use_new_zipfile_serialization=False"
        return UnsafeFile(error_text(f"{what}: only pickle can read this form: {old}", fix=_TRUST))
    return CorruptCheckpoint(error_text(f"{what}: not an archive of torch.save", found=f"it begins with {begin[:8]!r}"))


def slices(data: Any) -> Read:
    """Return a `Read` of bytes in memory."""
    view = memoryview(data).cast("B")

    def read(begin: int, end: int) -> memoryview:
        return view[begin:end]

    return read


# Additional records, which torch and other readers ignore.


def add_record(data: bytes, name: str, content: bytes) -> bytes:
    """Return an archive with one more record.

    Args:
        data: the archive.
        name: the record's; torch.save has none of this name.
        content: the record's bytes.

    Examples:
        >>> from shardtree.codec.archives import decode_archive, encode_archive, find_record
        >>> data = add_record(encode_archive({"step": 7}), "note", b"seven")
        >>> decode_archive(data, what="example"), find_record(data, "note", what="example")
        ({'step': 7}, b'seven')
    """
    archive = _open(data, "add_record")
    out, written = bytearray(), list[WrittenRecord]()
    for known in archive.records:
        append(out, 0, written, known, archive.data(known))
    append(out, 0, written, name, content)
    return bytes(out + directory(written, len(out)))


def find_record(data: bytes | bytearray | memoryview, name: str, *, what: str) -> bytes | None:
    """Return the bytes of an archive's record, None if it has none of this name or isn't such an archive.

    Raises:
        CorruptCheckpoint: the record's bytes don't have its CRC32.
    """
    try:
        archive = _open(data, what)
    except CheckpointingException:
        return None
    return bytes(archive.checked(name)) if name in archive.records else None


def _open(data: bytes | bytearray | memoryview, what: str) -> Archive:
    return open_archive(slices(data), memoryview(data).nbytes, what)

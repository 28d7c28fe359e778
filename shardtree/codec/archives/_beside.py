"""Records beside those of torch.save, which other readers of an archive pass over."""

from __future__ import annotations

from ...errors import CheckpointingException
from ._records import Archive, open_archive, slices
from ._write import Written, append, directory


def add_record(data: bytes, name: str, content: bytes) -> bytes:
    """Return an archive with one more record.

    Args:
        data: the archive.
        name: the record's; torch.save has none of this name.
        content: the record's bytes.

    Examples:
        >>> from shardtree.codec import decode_archive, encode_archive, find_record
        >>> data = add_record(encode_archive({"step": 7}), "note", b"seven")
        >>> decode_archive(data, what="example"), find_record(data, "note", what="example")
        ({'step': 7}, b'seven')
    """
    archive = _opened(data, "add_record")
    out, written = bytearray(), list[Written]()
    for known in archive.records:
        append(out, 0, written, known, archive.data(known))
    append(out, 0, written, name, content)
    return bytes(out + directory(written, len(out)))


def find_record(data: bytes | bytearray | memoryview, name: str, *, what: str) -> bytes | None:
    """Return the bytes of an archive's record, None where it has none of this name or isn't such an archive.

    Raises:
        CorruptCheckpoint: the record isn't what was written.
    """
    try:
        archive = _opened(data, what)
    except CheckpointingException:
        return None
    return bytes(archive.checked(name)) if name in archive.records else None


def _opened(data: bytes | bytearray | memoryview, what: str) -> Archive:
    return open_archive(slices(data), memoryview(data).nbytes, what)

"""The header of a safetensors file that anyone may have written, read from storage."""

from __future__ import annotations

from dataclasses import dataclass

from ...codec import Entry, decode_header, decode_header_metadata, header_length
from ...errors import CorruptCheckpoint, error_text
from ...storage import Reader, Storage

_FIRST_BYTES = 64 * 1024
_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class WeightFile:
    """What the header of a file says.

    Attributes:
        name: in the checkpoint's storage.
        length: in bytes.
        data_start: the byte at which `Entry.start` 0 lies.
        entries: in the order of their bytes.
        texts: the strings beside the tensors.
    """

    name: str
    length: int
    data_start: int
    entries: tuple[Entry, ...]
    texts: dict[str, str]


def read_header(storage: Storage, name: str) -> WeightFile:
    """Return what the header of a file says.

    Raises:
        CorruptCheckpoint: there is no such file, or its header isn't one or doesn't fit the file.
    """
    where = storage.where(name)
    if storage.length(name) is None:
        fix = "Fetch the file again, or load another checkpoint."
        raise CorruptCheckpoint(error_text(f"open: {where!r} belongs to the checkpoint", found="no such file", fix=fix))
    with storage.open(name) as reader:
        length = reader.length
        first = _bytes(reader, 0, min(length, _FIRST_BYTES))
        try:
            end = 8 + header_length(first, length)
            data = first + _bytes(reader, len(first), end) if end > len(first) else first
            entries, data_start = decode_header(data, length)
            return WeightFile(name, length, data_start, entries, decode_header_metadata(data, length))
        except CorruptCheckpoint as error:
            what = f"open: {where!r} is not a sound safetensors file"
            raise CorruptCheckpoint(error_text(what, found=_found(first, error), fix=_fix(first))) from error


def _bytes(reader: Reader, begin: int, end: int) -> bytearray:
    data = bytearray(end - begin)
    reader.read_into(begin, [memoryview(data)])
    return data


def _found(first: bytearray, error: CorruptCheckpoint) -> str:
    return "a pointer of git-lfs" if first.startswith(_POINTER) else str(error)


def _fix(first: bytearray) -> str:
    if first.startswith(_POINTER):
        return "Fetch the file itself: git lfs pull."
    return "It was damaged, or not fetched to its end; fetch it again, or load another checkpoint."

"""Checking the chunk files of arrays that another program wrote: their lengths, and whatever checksum a codec keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from ...errors import CheckpointingException, StrategyError, UnsupportedValue
from ...geometry import Column
from ...storage import Storage, in_threads
from .._findings import Damage, Finding, Region, Unchecked, uncovered
from .._values import Checkpoint
from ._array import Shape, StoredArray
from ._cells import missing_cells, stored_cells
from ._codecs import codec_list, codec_parts
from ._decode import decoded
from ._folder import metadata_files
from ._group import Group
from ._shard_index import index_bytes, read_shard_index

_MOST_SHOWN = 1000
"""How many missing chunk files of one array are named."""

_CHECKSUMS = frozenset({"crc32c", "crc32", "adler32", "fletcher32", "jenkins_lookup3"})

_PLAIN = "chunks without a checksum codec: their lengths are compared, and packed ones unpacked"
_METADATA = "metadata of arrays, which has no checksum: it has to be sound, and fit the chunks"


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """A chunk file, and its place in the grid of its array."""

    array: StoredArray
    cell: Shape

    @property
    def name(self) -> str:
        return self.array.file_name(self.cell)

    def damage(self, what: str, end: int = 0) -> Damage:
        """Return the damage of the file, with the box of the tensor that it holds."""
        low = tuple(at * step for at, step in zip(self.cell, self.array.step, strict=True))
        high = tuple(min(at + step, size) for at, step, size in zip(low, self.array.step, self.array.box, strict=True))
        region = Region(self.array.key, low, high) if self.array.shape else Region(self.array.key, (), ())
        return Damage(self.name, what, 0, end, (self.array.key,), (region,))


def group_findings(checkpoint: Checkpoint, group: Group) -> tuple[Finding, ...]:
    """Return which chunk files are missing, have another length, can't be decoded, or have no checksum."""
    found: list[Finding] = []
    chunks: list[_Chunk] = []
    for array in group.arrays:
        cells = stored_cells(checkpoint.storage, array)
        found += _absent(array, cells)
        chunks += [_Chunk(array, tuple(cell)) for cell in cells.tolist()]
    checked = in_threads(partial(_check_chunk, checkpoint), chunks, checkpoint.options.threads)
    return (*found, *(finding for one in checked for finding in one), *_metadata(checkpoint.storage))


def _absent(array: StoredArray, cells: Column) -> Iterator[Damage]:
    if array.fill is not None:
        return
    absent = missing_cells(array, cells)
    for cell in absent[:_MOST_SHOWN].tolist():
        yield _Chunk(array, tuple(cell)).damage("no such file")
    if len(absent) > _MOST_SHOWN:
        yield Damage(array.name, f"{len(absent) - _MOST_SHOWN} more files aren't there", keys=(array.key,))


def _check_chunk(checkpoint: Checkpoint, chunk: _Chunk) -> list[Finding]:
    storage, array, name = checkpoint.storage, chunk.array, chunk.name
    length = storage.length(name)
    if length is None:
        return [chunk.damage("no such file")]
    try:
        if not array.raw:
            return _check_packed(checkpoint, chunk, length)
        checkpoint.options.progress(length)
        if array.inner is not None:
            read_shard_index(storage, array, name)
            return list(uncovered(name, _PLAIN, length, _index_span(array, length)))
    except CheckpointingException as error:
        return [chunk.damage(str(error))]
    if length != array.file_bytes:
        return [chunk.damage(f"{length} bytes where a chunk has {array.file_bytes}", array.file_bytes)]
    return list(uncovered(name, _PLAIN, length, ()))


def _index_span(array: StoredArray, length: int) -> tuple[tuple[int, int], ...]:
    """Return where in a file with inner chunks its index lies, where that has a CRC."""
    size = index_bytes(array)
    return (((0, size) if array.index_first else (length - size, length)),) if array.index_checked else ()


def _check_packed(checkpoint: Checkpoint, chunk: _Chunk, length: int) -> list[Finding]:
    """Return what is wrong with a file that has to be decoded, which checks what checksums its codecs keep."""
    storage, array = checkpoint.storage, chunk.array
    unread = [Unchecked(chunk.name, "chunks that can't be decoded here", length)]
    try:
        decoded(storage, array, chunk.cell)
    except (StrategyError, UnsupportedValue):
        return list(unread)  # no zarr package, or too large at once: the bytes may be as they were saved
    checkpoint.options.progress(length)
    return [] if has_checksum(array) else list(uncovered(chunk.name, _PLAIN, length, ()))


def has_checksum(array: StoredArray) -> bool:
    """Return whether the last codec of an array is a checksum of all bytes of a chunk file.

    Examples:
        >>> import torch
        >>> document = {"codecs": [{"name": "bytes"}, {"name": "crc32c"}]}
        >>> has_checksum(StoredArray("w", "w", torch.int8, (4,), (4,), document=document))
        True
    """
    document = array.document if isinstance(array.document, dict) else {}
    if "codecs" in document:
        codecs = codec_list(document["codecs"], array.name)
    else:
        last = document.get("compressor")
        codecs = [last] if last is not None else codec_list(document.get("filters") or [], array.name)
    return bool(codecs) and codec_parts(codecs[-1], array.name)[0].removeprefix("numcodecs.") in _CHECKSUMS


def _metadata(storage: Storage) -> Iterator[Unchecked]:
    for name in metadata_files(storage):
        length = storage.length(name)
        if length:
            yield Unchecked(name, _METADATA, length)

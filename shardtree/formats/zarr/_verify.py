"""The check of a zarr folder's files against hashes and codecs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from ...errors import CheckpointingException, StrategyError, UnsafeFile, UnsupportedValue
from ...kit import (
    Checked,
    Checkpoint,
    Column,
    Damage,
    Finding,
    Region,
    Storage,
    Unchecked,
    canonical_json,
    checked_name,
    files_findings,
    in_threads,
    is_damaged,
    read_if_there,
    refused_findings,
    span_findings,
    threads_of,
    untaken_findings,
    whole_file_findings,
)
from ..torch import archive_findings
from ._array import Shape, StoredArray
from ._cells import index_bytes, missing_cells, read_shard_index, stored_cells
from ._codecs import codec_list, codec_parts
from ._group import Group, metadata_files
from ._load import decoded, decoded_object, object_bytes, read_arrays
from ._metadata import NODE_FILE
from ._own import BACKEND, group_members, is_own

# This section checks arrays of other programs: the lengths of chunk files, and checksums of codecs.

_MOST_SHOWN = 1000
"""Upper bound of the missing chunk files of an array that are listed."""

_CHECKSUMS = frozenset({"crc32c", "crc32", "adler32", "fletcher32", "jenkins_lookup3"})

_PLAIN = "chunks without a checksum codec: their lengths are compared, and packed ones unpacked"
_METADATA = "metadata of arrays, which has no checksum: it must be sound, and fit the chunks"


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """A chunk file, and its index in the array's grid of files."""

    array: StoredArray
    cell: Shape

    @property
    def name(self) -> str:
        return self.array.file_name(self.cell)

    def damage(self, what: str, end: int = 0) -> Damage:
        """Return the finding that the file is damaged, with the region of the tensor that it stores.

        Args:
            what: Description of the damage.
            end: End of the damaged bytes, which begin at the file's first byte; 0 if the whole file is damaged.
        """
        low = tuple(at * step for at, step in zip(self.cell, self.array.step, strict=True))
        high = tuple(min(at + step, size) for at, step, size in zip(low, self.array.step, self.array.box, strict=True))
        region = Region(self.array.key, low, high) if self.array.shape else Region(self.array.key, (), ())
        return Damage(self.name, what, 0, end, (self.array.key,), (region,))


def _group_findings(checkpoint: Checkpoint, group: Group) -> tuple[Finding, ...]:
    """Return the findings about the chunk files of another program's arrays, and about the arrays' metadata.

    A chunk file is damaged if it has a wrong length or can't be decoded, or if it is missing and the array has no fill
    value. Files without a checksum codec are reported as unchecked.
    """
    findings: list[Finding] = []
    chunks: list[_Chunk] = []
    for array in group.arrays:
        cells = stored_cells(checkpoint.storage, array)
        findings += _absent(array, cells)
        chunks += [_Chunk(array, tuple(cell)) for cell in cells.tolist()]
    threads = threads_of(checkpoint.storage, checkpoint.options.threads)
    results = in_threads(partial(_check_chunk, checkpoint), chunks, threads)
    findings += untaken_findings(group.untaken)
    return (*findings, *(finding for result in results for finding in result), *_metadata(checkpoint.storage))


def _absent(array: StoredArray, cells: Column) -> Iterator[Damage]:
    # By zarr's spec, a missing chunk has the fill value. Megatron-Core writes null for it, so that it is damage there.
    if array.fill is not None:
        return
    absent = missing_cells(array, cells)
    for cell in absent[:_MOST_SHOWN].tolist():
        yield _Chunk(array, tuple(cell)).damage("no such file")
    if len(absent) > _MOST_SHOWN:
        yield Damage(array.name, f"{len(absent) - _MOST_SHOWN} more files are missing", keys=(array.key,))


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
            return list(span_findings(name, _PLAIN, length, _index_span(array, length)))
    except CheckpointingException as error:
        return [chunk.damage(str(error))]
    if length != array.file_bytes:
        return [chunk.damage(f"{length} bytes, but a chunk has {array.file_bytes}", array.file_bytes)]
    return list(span_findings(name, _PLAIN, length, ()))


def _index_span(array: StoredArray, length: int) -> tuple[tuple[int, int], ...]:
    """Return the byte ranges with a checksum in a file with inner chunks: their index if it has a CRC, else none."""
    size = index_bytes(array)
    return (((0, size) if array.index_first else (length - size, length)),) if array.index_checked else ()


def _check_packed(checkpoint: Checkpoint, chunk: _Chunk, length: int) -> list[Finding]:
    """Decode a compressed or otherwise encoded chunk file, which checks its codecs' checksums; return the findings."""
    storage, array = checkpoint.storage, chunk.array
    unread = [Unchecked(chunk.name, "chunks that cannot be decoded on this machine", length)]
    try:
        decoded(storage, array, chunk.cell)
    except (StrategyError, UnsupportedValue):
        return list(unread)  # The zarr package is missing or the chunk too large: the bytes may be what was saved.
    checkpoint.options.progress(length)
    return list(span_findings(chunk.name, _PLAIN, length, ((0, length),) if has_checksum(array) else ()))


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


def _object_findings(checkpoint: Checkpoint, group: Group) -> Iterator[Finding]:
    """Yield the findings about files of objects in Megatron-Core's old format.

    A file is a torch archive: damaged if the CRC of an archive entry differs, unchecked where entries have no CRC.
    """
    for number in group.index.object_file.tolist():
        name = group.index.file(number).name
        try:
            data = object_bytes(checkpoint, name)
            try:
                decoded_object(checkpoint, name, data)
            except (UnsafeFile, UnsupportedValue) as error:  # The bytes may still be what was saved.
                yield from refused_findings({name: str(error)})
            yield from archive_findings(name, data)
        except CheckpointingException as error:
            yield Damage(name, str(error))


# This section checks our own folders: every chunk file against its hashes, every zarr.json against the group's.


def verify_files(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """Return the findings about a checkpoint's folder, from comparing its files with hashes of whole files or blocks.

    Files that several ranks wrote have no hashes, nor do arrays of other programs, such as Megatron-Core's. Damage of
    these is found if a file is missing or cut, can't be decoded, or fails a codec's own checksum.
    """
    findings: list[Finding] = list(whole_file_findings(checkpoint, "common")) if "common" in checkpoint.fields else []
    if checkpoint.fields["sharded_backend"] != BACKEND:
        return (*findings, *_beside_common(checkpoint))
    if not is_own(checkpoint.fields):
        try:
            group = read_arrays(checkpoint)
        except CheckpointingException as error:
            return (Damage("", str(error)),)
        return (*_group_findings(checkpoint, group), *_object_findings(checkpoint, group))
    findings += _documents(checkpoint)
    try:
        index = read_arrays(checkpoint).index
    except CheckpointingException as error:
        # The index has the hashes of chunk files, so that these can't be checked.
        return (*findings, Damage(checked_name(checkpoint, "index"), str(error)))
    length = int(checkpoint.fields["index"]["length"])
    checkpoint.options.progress(length)
    return (*findings, Checked(checked_name(checkpoint, "index"), length), *files_findings(checkpoint, index))


def _beside_common(checkpoint: Checkpoint) -> Iterator[Unchecked]:
    """Yield the common state's zarr.json as unchecked, for a checkpoint whose shards have another format.

    In our own folders, it is compared with its copy in the group's zarr.json. Here there is no such copy.
    """
    name = f"{checked_name(checkpoint, 'common').rpartition('/')[0]}/{NODE_FILE}"
    length = checkpoint.storage.length(name) if "common" in checkpoint.fields else None
    if length:
        yield Unchecked(name, _METADATA, length)


def _documents(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Compare each zarr.json with its copy in the outermost group's zarr.json, and yield damaged and checked files."""
    findings = list(whole_file_findings(checkpoint, "group"))
    yield from findings
    if is_damaged(findings):
        return
    storage = checkpoint.storage
    expected = {f"{folder}/{NODE_FILE}": canonical_json(node) for folder, node in group_members(checkpoint).items()}
    contents = in_threads(partial(read_if_there, storage), expected, threads_of(storage, checkpoint.options.threads))
    for (name, document), data in zip(expected.items(), contents, strict=True):
        if data != document:
            yield Damage(name, "the metadata of an array differs from its copy in the group's zarr.json")
        checkpoint.options.progress(len(data or b""))
        yield Checked(name, len(data or b""))

"""The files of a zarr folder: checking them against hashes and codecs, listing them, and removing tensors."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from ...codec import canonical_json, parse_json
from ...errors import CheckpointingException, CorruptCheckpoint, StrategyError, UnsupportedValue, error_text
from ...geometry import Column
from ...storage import (
    Storage,
    can,
    digest,
    in_threads,
    is_folder,
    read_if_there,
    remove_files,
    remove_folder,
    threads_of,
)
from .._findings import Damage, Finding, Region, Unchecked, uncovered, untaken_findings
from .._manifest import MANIFEST_FILE
from .._metadata import read_checked, read_metadata, replace_metadata
from .._values import Checkpoint, ReadCache
from ..index import Index, files_damage, texts, without_prefix
from ._array import Shape, StoredArray
from ._blobs import FOLDER, Document, blob, decode_columns, encode_columns, group_document, write_blob
from ._cells import index_bytes, missing_cells, read_shard_index, stored_cells
from ._codecs import codec_list, codec_parts
from ._group import Group, find_arrays, metadata_files
from ._layout import array_name
from ._load import decoded, is_own, read_arrays
from ._metadata import NODE_FILE

# Checking arrays of other programs: the lengths of chunk files, and checksums of codecs

_MOST_SHOWN = 1000
"""How many missing chunk files of one array are listed."""

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
    threads = threads_of(checkpoint.storage, checkpoint.options.threads)
    checked = in_threads(partial(_check_chunk, checkpoint), chunks, threads)
    found += untaken_findings(group.untaken)
    return (*found, *(finding for one in checked for finding in one), *_metadata(checkpoint.storage))


def _absent(array: StoredArray, cells: Column) -> Iterator[Damage]:
    # By zarr's spec a missing chunk has the fill value. Megatron-Core writes null for that, so there it is damage.
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
    """Return the byte range of the index in a file with inner chunks, if it has a CRC."""
    size = index_bytes(array)
    return (((0, size) if array.index_first else (length - size, length)),) if array.index_checked else ()


def _check_packed(checkpoint: Checkpoint, chunk: _Chunk, length: int) -> list[Finding]:
    """Return what is wrong with a file that has to be decoded; decoding checks the checksums of its codecs."""
    storage, array = checkpoint.storage, chunk.array
    unread = [Unchecked(chunk.name, "chunks that can't be decoded here", length)]
    try:
        decoded(storage, array, chunk.cell)
    except (StrategyError, UnsupportedValue):
        return list(unread)  # no zarr package, or a chunk that is too large: the bytes may be what was saved
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


# Removing tensors and objects from a folder of ours: a new index first, then the arrays that became unused

_CHUNK_FILE = re.compile(r"(?P<folder>.+)/c(\.\d+)*")
_INDEX_FOLDER = re.compile(rf"{FOLDER}/index(-(?P<number>\d{{1,9}}))?")
_NUMBERS = 10**9


def remove_sharded(checkpoint: Checkpoint, key_prefix: str) -> None:
    """Remove every stored tensor and object whose key begins with a prefix, and the arrays that become unused.

    Raises:
        StrategyError: another program wrote the arrays.
    """
    storage = checkpoint.storage
    if not is_own(checkpoint.fields):
        fix = "Remove the arrays' folders."
        raise StrategyError(error_text(f"remove: no save of ours wrote {storage.where()!r}", fix=fix))
    before, fields = read_metadata(storage)
    current = replace(checkpoint, fields=fields, cache=ReadCache())
    old = decode_columns(*read_checked(current, "index"))
    new = without_prefix(old, key_prefix)
    if new is old:
        return
    members, unused = group_members(current), _unused(old, new)
    gone = (_folders(old, new) | folders_of(unused)).intersection(members)
    old_index = str(fields["index"]["name"]).rpartition("/")[0]
    data = encode_columns(new)
    name, document = blob(_next_index(old_index, storage), len(data))
    write_blob(storage, name, [memoryview(data)], document, durable=True)
    gone.add(old_index)
    kept = {folder: each for folder, each in members.items() if folder not in gone}
    kept[name.rpartition("/")[0]] = document
    group = canonical_json(group_document({folder: kept[folder] for folder in sorted(kept)}))
    fields["index"] = {"name": name, "length": len(data), "digest": digest(data)}
    fields["group"] = {"name": NODE_FILE, "length": len(group), "digest": digest(group)}
    # metadata.json first, which we go by, then the group, which other programs go by, then the files: wherever this is
    # interrupted, every array that is listed anywhere is there.
    replace_metadata(storage, before, fields, durable=True)
    storage.replace(NODE_FILE, group, durable=True)
    _remove(storage, unused, gone)


def _unused(old: Index, new: Index) -> set[str]:
    """Return the files that only the old index refers to."""
    return set(texts(old.file_text, old.file_start)) - set(texts(new.file_text, new.file_start))


def _folders(old: Index, new: Index) -> set[str]:
    """Return the folders of the tensors that only the old index has."""
    keys = set(texts(old.key_text, old.key_start)) - set(texts(new.key_text, new.key_start))
    return {array_name(key) for key in keys}


def group_members(checkpoint: Checkpoint) -> dict[str, Document]:
    """Return the metadata of all arrays and groups, by folder, from the group's zarr.json.

    Raises:
        CorruptCheckpoint: the file isn't what was saved.
    """
    data, where = read_checked(checkpoint, "group")
    node: Any = parse_json(data, where)
    for name in ("consolidated_metadata", "metadata"):
        node = node.get(name) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        raise CorruptCheckpoint(error_text(f"open: {where!r} is not sound", expected="the metadata of all arrays"))
    return node


def folders_of(files: Iterable[str]) -> set[str]:
    """Return the folders of the files that are named like chunks.

    Examples:
        >>> sorted(folders_of(["w/c.0.1", "w/c.0.0", "s/c", "notes/cat.0"]))
        ['s', 'w']
    """
    return {found["folder"] for found in map(_CHUNK_FILE.fullmatch, files) if found}


def _next_index(folder: str, storage: Storage) -> str:
    """Return the name of the index that follows the one in a folder."""
    found = _INDEX_FOLDER.fullmatch(folder)
    number = int(found["number"] or 0) + 1 if found else 1
    # What an earlier removal has sent may arrive yet, under the next number: it mustn't replace this one's index.
    more = secrets.randbelow(_NUMBERS - 1) if can(storage).late_requests else 0
    return f"index-{(number + more) % _NUMBERS}"


def _remove(storage: Storage, files: Iterable[str], folders: Iterable[str]) -> None:
    # Guards against a crafted index that names other files: only names that a save gives are removed.
    remove_files(storage, sorted(name for name in files if _CHUNK_FILE.fullmatch(name)))
    nodes = [f"{folder}/{NODE_FILE}" for folder in sorted(folders)]
    remove_files(storage, [*nodes, *(f"{folder}/c.0" for folder in folders if _INDEX_FOLDER.fullmatch(folder))])
    for folder in sorted(folders):
        remove_folder(storage, folder)


# Checking a folder of ours: every chunk file against its hashes, every zarr.json against the group's


def verify_files(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """Return what is damaged: small files as wholes, chunk files block by block.

    A file that several ranks wrote has no hashes, and neither have arrays of other programs: of these, files that are
    missing or cut, that can't be decoded, or that a codec's own checksum finds wrong are reported.
    """
    if not is_own(checkpoint.fields):
        try:
            return group_findings(checkpoint, read_arrays(checkpoint))
        except CheckpointingException as error:
            return (Damage("", str(error)),)
    found = [*_whole(checkpoint, "common"), *_documents(checkpoint)]
    try:
        index = read_arrays(checkpoint).index
    except CheckpointingException as error:
        # The chunk files' hashes are in the index.
        return (*found, Damage(_name(checkpoint, "index"), str(error)))
    checkpoint.options.progress(int(checkpoint.fields["index"]["length"]))
    return (*found, *files_damage(checkpoint, index))


def _whole(checkpoint: Checkpoint, field: str) -> Iterator[Damage]:
    try:
        if field in checkpoint.fields:
            data, _ = read_checked(checkpoint, field)
            checkpoint.options.progress(data.nbytes)
    except CorruptCheckpoint as error:
        yield Damage(_name(checkpoint, field), str(error))


def _name(checkpoint: Checkpoint, field: str) -> str:
    entry = checkpoint.fields[field]
    return str(entry.get("name")) if isinstance(entry, dict) else ""


def _documents(checkpoint: Checkpoint) -> Iterator[Damage]:
    """Yield which zarr.json files differ from what the group's says of them."""
    damage = list(_whole(checkpoint, "group"))
    yield from damage
    if damage:
        return
    storage = checkpoint.storage
    expected = {f"{folder}/{NODE_FILE}": canonical_json(each) for folder, each in group_members(checkpoint).items()}
    found = in_threads(partial(read_if_there, storage), expected, threads_of(storage, checkpoint.options.threads))
    for (name, document), data in zip(expected.items(), found, strict=True):
        if data != document:
            yield Damage(name, "the metadata of an array isn't what the group's zarr.json says of it")
        checkpoint.options.progress(len(data or b""))


# Listing the files of a folder of zarr arrays

_NODES = (NODE_FILE, ".zarray", ".zattrs", ".zgroup", ".zmetadata")
_CHUNK_PART = re.compile(r"c|(c\.)?\d+(\.\d+)*")
_DEEPEST = 64


def list_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names of the arrays' metadata and chunks, of the groups' metadata, and of objects' files.

    Raises:
        CorruptCheckpoint: the metadata of an array isn't sound.
    """
    storage = checkpoint.storage
    arrays, objects, untaken = find_arrays(storage)
    folders = {array.name for array in arrays} | set(filter(partial(is_folder, storage), untaken))
    groups = {str(above) for name in folders for above in PurePosixPath(name).parents} - {"."}
    nodes = [f"{folder}/{node}" for folder in sorted(folders | groups) for node in _NODES]
    chunks = [name for folder in sorted(folders) for name in _chunks(storage, folder)]
    return (*_NODES, MANIFEST_FILE, *nodes, *chunks, *(name for _, name, _ in objects))


def _chunks(storage: Storage, folder: str, depth: int = 0) -> Iterator[str]:
    for last in storage.names(folder):
        name = f"{folder}/{last}"
        if _CHUNK_PART.fullmatch(last) is None:
            continue
        if is_folder(storage, name) and depth < _DEEPEST:
            yield from _chunks(storage, name, depth + 1)
        else:
            yield name

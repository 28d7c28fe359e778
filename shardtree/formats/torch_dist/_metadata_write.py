"""The writer of `.metadata`, a pickle that torch.distributed.checkpoint reads.

It makes the many records of chunks side by side, from arrays with a row for each chunk. It emits opcodes itself, and
doesn't pickle instances of torch's classes. So it needs no import of torch.distributed, and the bytes don't depend on
torch's version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import TreePath
from ...kit import Column, ShardColumns, TensorKind, dtype_name
from ..pickles import Global, New, Pairs, PickleWriter, Reduced, reference, write_pickle

Archive = tuple[str, int, int]
"""Name of an archive's file, offset of the archive, and its length in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class WrittenContents:
    """Archives that all ranks of a checkpoint wrote.

    Attributes:
        columns: Distinct boxes of tensors, sorted by key and offset.
        files: Names of the data files.
        file: Number of each box's file, int64 (boxes,).
        byte: Offset of each box's archive in its file, int64 (boxes,).
        length: Length of each box's archive in bytes, int64 (boxes,).
        objects: Archive of each object by unique key, sorted.
    """

    columns: ShardColumns
    files: tuple[str, ...]
    file: Column
    byte: Column
    length: Column
    objects: dict[str, Archive]


_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_SIZE = Global("torch", "Size")

DCP_VERSION = "1.0.0"
"""Version of the format, as torch.distributed.checkpoint names it."""

Paths = Mapping[str, TreePath]


def encode_index_file(
    contents: WrittenContents, save_id: str, values: Mapping[str, Archive] | None = None, paths: Paths | None = None
) -> bytes:
    """Return the bytes of `.metadata`: torch.distributed.checkpoint's `Metadata`, pickled with protocol 4.

    Unlike torch's own file, these bytes lack the path of the folder: a checkpoint may be copied and published.

    Args:
        contents: Archives of tensors and objects.
        save_id: Name of the save.
        values: Archives of plain values, by name.
        paths: Path of each name in the nested dict that was saved; None if the format stores none.

    References:
        torch.distributed.checkpoint.metadata, torch 2.13.
    """
    archives = {**contents.objects, **(values or {})}
    columns = contents.columns
    metadata: dict[str, Any] = {
        "state_dict_metadata": Pairs(len(archives) + len(columns.keys), partial(_write_entries, archives, columns)),
        "planner_data": None if paths is None else Pairs(len(paths), partial(_write_paths, paths)),
        "storage_data": Pairs(len(archives) + len(columns), partial(_write_places, archives, contents)),
        "storage_meta": _new("StorageMeta", checkpoint_id=None, save_id=save_id, load_id=None, modules=[]),
        "version": DCP_VERSION,
    }
    return write_pickle(_new("Metadata", **metadata), protocol=4)


# These functions return records as values, which are written one by one if they have names that weren't written before.


def _tensor(kind: TensorKind, chunks: list[New]) -> New:
    return _new("TensorStorageMetadata", properties=_properties(kind), size=_size(kind.global_shape), chunks=chunks)


def _index(name: str, offset: Reduced | None = None, number: int | None = None) -> New:
    """Return the key by which DCP looks up an archive; its number among the tensor's chunks saves DCP a search."""
    return _new("MetadataIndex", fqn=name, index=number, offset=offset)


def _place(file: str, byte: int, length: int) -> New:
    return _new("_StorageInfo", _FILESYSTEM, relative_path=file, offset=byte, length=length)


def _properties(kind: TensorKind) -> New:
    layout = Reduced(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    memory_format = Reduced(Global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    state = (Global("torch", dtype_name(kind.dtype)), layout, False, memory_format, False)
    return New(_class(_METADATA, "TensorProperties"), (), state)


def _size(shape: Sequence[int]) -> Reduced:
    return Reduced(_SIZE, (tuple(shape),))


def _new(name: str, module: str = _METADATA, **state: Any) -> New:
    """Return an instance of one of torch's classes, with the fields `state`.

    It is unpickled without the class's constructor, so that torch versions with other fields can read it.
    """
    return New(_class(module, name), (), state or None)


@cache
def _class(module: str, name: str) -> Global:
    return Global(module, name)


# These functions write the three dicts. Records that refer only to known strings have the same opcodes with other
# numbers: those of all chunks are written side by side. A record with a new name goes through the writer, which gives
# the name its memo number.

_DEPTH = 2
"""Depth of the values in the dicts of `Metadata`."""


def _write_entries(archives: Mapping[str, Archive], columns: ShardColumns, writer: PickleWriter) -> None:
    """Write the entry of each value and tensor."""
    for name in archives:
        writer.write(name, _DEPTH)
        writer.write(_new("BytesStorageMetadata"), _DEPTH)
    edges = np.searchsorted(columns.key, np.arange(len(columns.keys) + 1)).tolist()
    heads: dict[tuple[torch.dtype, tuple[int, ...]], bytes] = {}
    dtypes: set[torch.dtype] = set()
    chunks: Records | None = None
    for key, kind, (begin, end) in zip(columns.keys, columns.kinds, pairwise(edges), strict=True):
        writer.write(key, _DEPTH)
        if chunks is None or kind.dtype not in dtypes:
            writer.write(_tensor(kind, _boxes(columns, kind, begin, end)), _DEPTH)
            dtypes.add(kind.dtype)
            if chunks is None and begin < end:
                chunks = _chunk_records(writer, columns)
            continue
        shape = kind.dtype, kind.global_shape
        head = heads.get(shape)
        if head is None:
            head = heads[shape] = _plain_opcodes(writer, _tensor(kind, [])).removesuffix(b"ub")
        parts = (head, b"(", chunks.part(begin, end), b"eub") if begin < end else (head, b"ub")
        writer.out += parts


def _boxes(columns: ShardColumns, kind: TensorKind, begin: int, end: int) -> list[New]:
    first = columns.offset.shape[1] - len(kind.global_shape)
    pairs = zip(*(column[begin:end, first:].tolist() for column in (columns.offset, columns.shape)), strict=True)
    return [_new("ChunkStorageMetadata", offsets=_size(offset), sizes=_size(shape)) for offset, shape in pairs]


def _chunk_records(writer: PickleWriter, columns: ShardColumns) -> Records:
    begin, sizes = _begin(writer, _class(_METADATA, "ChunkStorageMetadata"), "offsets"), _plain_opcodes(writer, "sizes")
    axes, size = _axes(columns), _plain_opcodes(writer, _SIZE)

    def fields(rows: slice) -> Iterator[Field]:
        yield _constant(begin + size)
        yield from _tuples(columns.offset[rows], axes[rows])
        yield _constant(b"\x85R" + sizes + size)
        yield from _tuples(columns.shape[rows], axes[rows])
        yield _constant(b"\x85Rub")

    return _records(0, len(columns), fields)


def _write_paths(paths: Paths, writer: PickleWriter) -> None:
    """Write the entries of `planner_data`: each value's name, and its path in the nested dict, usually ``(name,)``."""
    for key, path in paths.items():
        number = writer.memo.get(key) if path == (key,) else None
        if number is None:
            writer.write(key, _DEPTH)
            writer.write(path, _DEPTH)
        else:
            code = reference(number)
            writer.out += (code, code, b"\x85")


def _write_places(archives: Mapping[str, Archive], contents: WrittenContents, writer: PickleWriter) -> None:
    """Write the entries of `storage_data`: for each value and chunk, its index and its archive's place.

    The place is the archive's file, its offset in the file, and its length.
    """
    for name, archive in archives.items():
        writer.write(_index(name), _DEPTH)
        writer.write(_place(*archive), _DEPTH)
    columns = contents.columns
    if not len(columns):
        return
    offset = columns.offset[0, columns.offset.shape[1] - _axes(columns)[0] :].tolist()
    writer.write(_index(columns.keys[columns.key[0]], _size(offset), 0), _DEPTH)
    file, byte, length = (int(column[0]) for column in (contents.file, contents.byte, contents.length))
    writer.write(_place(contents.files[file], byte, length), _DEPTH)
    writer.out.append(_place_records(writer, contents).part(1, len(columns)))


def _place_records(writer: PickleWriter, contents: WrittenContents) -> Records:
    """Return the opcodes of all chunks' entries in `storage_data` except the first.

    The first chunk's entry must be in the pickle already, since the other entries refer to its classes and fields.
    """
    columns, axes = contents.columns, _axes(contents.columns)
    key = np.array([writer.memo[name] for name in columns.keys], dtype=np.int64)
    within = np.arange(len(columns)) - np.searchsorted(columns.key, columns.key)
    begin = _begin(writer, _class(_METADATA, "MetadataIndex"), "fqn")
    between = b"\x85Rub" + _begin(writer, _class(_FILESYSTEM, "_StorageInfo"), "relative_path")
    index, offset, length, size = (_plain_opcodes(writer, name) for name in ("index", "offset", "length", _SIZE))
    names = _file_names(writer, contents.files, contents.file[1:])

    def fields(rows: slice) -> Iterator[Field]:
        yield _constant(begin)
        yield _references(key[columns.key[rows]])
        yield _constant(index)
        yield _numbers(within[rows])
        yield _constant(offset + size)
        yield from _tuples(columns.offset[rows], axes[rows])
        yield _constant(between)
        yield names(slice(rows.start - 1, rows.stop - 1))
        yield _constant(offset)
        yield _numbers(contents.byte[rows])
        yield _constant(length)
        yield _numbers(contents.length[rows])
        yield _constant(b"ub")

    return _records(1, len(columns), fields)


def _file_names(writer: PickleWriter, files: Sequence[str], rows: Column) -> Callable[[slice], Field]:
    """Return a function from a slice of rows to their file names as opcodes.

    A name is written as a string at its first use, and as a reference to this string from then on.

    Args:
        writer: Writer of the pickle.
        files: Names of the files.
        rows: Number of each row's file, int64 (rows,).
    """
    used, first = np.unique(rows, return_index=True)
    codes, row = [b""] * len(files), rows.copy()
    for number, at in sorted(zip(used.tolist(), first.tolist(), strict=True), key=itemgetter(1)):
        is_new = files[number] not in writer.memo
        opcodes = _opcodes(writer, files[number])
        codes[number] = reference(writer.memo[files[number]])
        if is_new:
            row[at] = len(codes)
            codes.append(opcodes)
    width = np.array([len(code) for code in codes], dtype=np.int64)
    table = np.frombuffer(b"".join(code.ljust(width.max(), b"\0") for code in codes), dtype=np.uint8)
    table = table.reshape(len(codes), -1)
    return lambda part: (table[row[part]], width[row[part]])


def _axes(columns: ShardColumns) -> Column:
    """Return the number of axes of each box's tensor."""
    axes: Column = np.array([len(kind.global_shape) for kind in columns.kinds], dtype=np.int64)[columns.key]
    return axes


def _begin(writer: PickleWriter, cls: Global, field: str) -> bytes:
    """Return the opcodes that begin an object and its state, up to the name of the first field."""
    return _plain_opcodes(writer, cls) + b")\x81}(" + _plain_opcodes(writer, field)


def _plain_opcodes(writer: PickleWriter, value: Any) -> bytes:
    """Return the pickle opcodes of a value; all strings and classes in it must be in the writer's memo."""
    before = len(writer.memo)
    code = _opcodes(writer, value)
    if len(writer.memo) != before:
        raise ValueError(f"{value} has names that were not written before")
    return code


def _opcodes(writer: PickleWriter, value: Any) -> bytes:
    beside = PickleWriter(writer.protocol)
    beside.memo = writer.memo
    beside.write(value, _DEPTH)
    return b"".join(beside.out)


# Records are written side by side: a field is a column of opcodes, padded to the longest, with the length of each row.

Field = tuple[NDArray[np.uint8], Column]

_AT_ONCE = 32_768


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """The opcodes of many records, one after the other.

    Attributes:
        first: Number of the first record.
        opcodes: Opcodes of all records.
        edge: Offset of each record, and the end of the last.
    """

    first: int
    opcodes: memoryview
    edge: list[int]

    def part(self, begin: int, end: int) -> memoryview:
        """Return the opcodes of the records `begin` to `end`, without record `end`."""
        return self.opcodes[self.edge[begin - self.first] : self.edge[end - self.first]]


def _records(first: int, last: int, fields: Callable[[slice], Iterable[Field]]) -> Records:
    """Return the pickle opcodes of the records `first` to `last`, without record `last`.

    A record is an entry of a large collection in `.metadata`, such as a chunk of a tensor. Records are encoded in
    batches to save memory, since fields are padded to equal length at first. The result has no padding.

    Args:
        first: Index of the first record.
        last: Index after the last record.
        fields: Function that encodes a slice of records. It returns one `Field` for each part of a record, in order.
    """
    parts, lengths = [b""], [np.zeros(1, dtype=np.int64)]
    for begin in range(first, last, _AT_ONCE):
        count = min(_AT_ONCE, last - begin)
        columns = [*fields(slice(begin, begin + count))]
        matrix = np.concatenate([np.broadcast_to(code, (count, code.shape[1])) for code, _ in columns], axis=1)
        counts = [np.arange(code.shape[1]) < np.broadcast_to(width, count)[:, None] for code, width in columns]
        parts.append(matrix[np.concatenate(counts, axis=1)].tobytes())
        lengths.append(sum((width for _, width in columns), np.zeros(count, dtype=np.int64)))
    return Records(first, memoryview(b"".join(parts)), np.cumsum(np.concatenate(lengths)).tolist())


def _constant(code: bytes) -> Field:
    return np.frombuffer(code, dtype=np.uint8)[None], np.array([len(code)])


def _numbers(values: Column) -> Field:
    """Return the shortest opcode for each number; all must be whole numbers of at least 0."""
    little = values.astype("<i8").view(np.uint8).reshape(-1, 8)
    op = np.where(values < 256, ord("K"), np.where(values < 65_536, ord("M"), ord("J")))
    width = np.where(values < 256, 2, np.where(values < 65_536, 3, 5))
    code = np.concatenate([op.astype(np.uint8)[:, None], little[:, :4]], axis=1)
    long = np.flatnonzero(values >= 2**31)
    if long.size:
        # The length has one more byte than the bits need if their highest bit would be taken as a sign.
        size = sum((values[long] >= 2**bits).astype(np.int64) for bits in (39, 47, 55)) + 5
        code = np.pad(code, ((0, 0), (0, 5)))
        code[long, 0], code[long, 1], code[long, 2:], width[long] = 0x8A, size, little[long], 2 + size
    return code, width


def _references(numbers: Column) -> Field:
    """Return one pickle opcode for each memo number; it pushes the memo entry with that number."""
    code = np.empty((numbers.size, 5), dtype=np.uint8)
    short = numbers < 256
    code[:, 0] = np.where(short, ord("h"), ord("j"))
    code[:, 1:] = numbers.astype("<u4").view(np.uint8).reshape(-1, 4)
    return code, np.where(short, 2, 5)


def _tuples(boxes: Column, axes: Column) -> Iterator[Field]:
    """Yield the opcodes of one tuple for each row, field by field.

    Args:
        boxes: Offsets or shapes, right-aligned, int64 (rows, width).
        axes: Number of axes of each row; its tuple has as many entries, int64 (rows,).
    """
    width = boxes.shape[1]
    yield np.array([[ord("(")]], dtype=np.uint8), (axes > 3).astype(np.int64)
    for axis in range(width):
        code, length = _numbers(boxes[:, axis])
        yield code, np.where(axis >= width - axes, length, 0)
    ends = np.frombuffer(b")\x85\x86\x87t", dtype=np.uint8)
    yield ends[np.minimum(axes, 4)][:, None], np.ones(axes.size, dtype=np.int64)

"""The reader of `.metadata`, a pickle of torch.distributed.checkpoint, which runs no code that the file names."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from ...errors import CheckpointingException, CorruptCheckpoint, error_text
from ...kit import METADATA_FILE, Checkpoint, Column, read_if_there
from ..manifest import check_listed
from ..pickles import Irregular, Run, Stub, read_pickle
from ._metadata_content import (
    ArchivePlaces,
    MetadataFile,
    Paths,
    TensorEntries,
    field_of,
    is_a,
    kind_of,
    metadata_classes,
    read_trusted,
)
from ._metadata_scan import MetadataScan, ScanColumns
from ._pickled_columns import Ints, match_pairs, without_repeated

INDEX_FILE = ".metadata"
"""Name of the file that lists the places of archives."""

_MOST_AXES = 64  # This is NumPy's limit.
_DEEPEST = 100

_MOST_NUMBERS = 2**27
"""Upper bound of the numbers in the table of shapes: all get the axes of the longest, which a crafted file chooses."""


def read_metadata_file(checkpoint: Checkpoint) -> MetadataFile:
    """Return the content of a checkpoint's `.metadata`.

    Raises:
        CorruptCheckpoint: The file is missing, or isn't what torch.distributed.checkpoint writes.
        UnsafeFile: The file names a class that doesn't belong in it, and `allow_pickle` isn't given.
    """
    where = checkpoint.storage.where(INDEX_FILE)
    if (data := read_if_there(checkpoint.storage, INDEX_FILE)) is None:
        fix = "Pass the folder that the save was given. If you did, the save was interrupted: load another checkpoint."
        raise CorruptCheckpoint(error_text(f"open: {where!r} is missing", fix=fix))
    # Only Megatron-Core's integrity.json has a hash of the index: without it, only contradictions can be found.
    if checkpoint.options.verify is not None:
        check_listed(checkpoint, METADATA_FILE)
        check_listed(checkpoint, INDEX_FILE)
    if not checkpoint.options.allow_pickle:
        try:
            return parse_metadata(data, where)
        except (CheckpointingException, ValueError, TypeError, KeyError, OverflowError):
            pass  # The careful reader below reads irregular files, and raises the error for faulty ones.
    read = read_trusted if checkpoint.options.allow_pickle else read_pickle
    root = read(data, metadata_classes(), what=where)
    try:
        return _parse(root, ScanColumns())
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise unsound(where, error) from error


def unsound(where: str, error: Exception) -> CorruptCheckpoint:
    """Return the error for a `.metadata` that contradicts itself."""
    fix = "It was damaged or made by another program; load another checkpoint."
    cause = str(error)[:300] or type(error).__name__
    return CorruptCheckpoint(error_text(f"open: {where!r} has invalid contents", found=cause, fix=fix))


def parse_metadata(data: bytes, where: str) -> MetadataFile:
    """Return the content of `.metadata`, read quickly: a scan turns regular parts straight into columns.

    Args:
        data: Bytes of the file.
        where: Path or URL of the file, for errors.

    Raises:
        CheckpointingException, ValueError, TypeError, KeyError, OverflowError: The file is damaged, or too irregular
            for a scan; reading it without a scan tells which.
    """
    classes = metadata_classes()
    scan = MetadataScan(classes)
    root = read_pickle(data, classes, what=where, scan=scan)
    return _parse(root, scan.columns)


def _parse(root: Any, scan_columns: ScanColumns) -> MetadataFile:
    if not (is_a(root, "Metadata") or is_a(root, "MCoreMetadata")):
        raise ValueError(f"{kind_of(root)} in place of Metadata")
    entries, storage_data = field_of(root, "state_dict_metadata"), field_of(root, "storage_data")
    if not isinstance(entries, dict) or not isinstance(storage_data, dict):
        raise ValueError("state_dict_metadata or storage_data is missing")
    tensors, places = _TensorTable(scan_columns), _PlaceTable(scan_columns)
    for table, pairs in ((tensors, entries), (places, storage_data)):
        for key, entry in pairs.items():
            if type(key) is Run:
                table.add_run(key)
            else:
                table.add(key, entry)
    if len({*tensors.keys, *tensors.values}) != len(tensors.keys) + len(tensors.values):
        raise Irregular("a key that is listed twice")
    # Every run must be used exactly where the scan put it.
    if tensors.runs + places.runs != scan_columns.runs:
        raise Irregular("a run that is used elsewhere")
    return _content(tensors, places, field_of(root, "mcore_data"), _paths(field_of(root, "planner_data")))


class _TensorTable:
    """The tensors and values that `.metadata` lists; all chunks' offsets and shapes are rows of one table."""

    def __init__(self, scan_columns: ScanColumns) -> None:
        self.scan_columns = scan_columns
        self.keys: list[str] = []
        self.kinds: list[Any] = []
        self.shape: list[Column] = []
        self.count: list[Column] = []
        self.offset: list[Column] = []
        self.size: list[Column] = []
        self.values: list[str] = []
        self.runs = 0
        none = np.zeros(0, dtype=np.int64)
        self._offset, self._size = (
            np.concatenate([none, *parts]) for parts in (scan_columns.chunk_offset, scan_columns.chunk_shape)
        )
        self._shape = np.concatenate([none, *scan_columns.tensor_shape])

    def add(self, key: Any, entry: Any) -> None:
        """Add a tensor or value that the pickle's reader returned as Python objects."""
        if type(key) is not str or not key:
            raise ValueError(f"a key that is empty or not a string: {kind_of(key)}")
        if is_a(entry, "TensorStorageMetadata"):
            self._add_tensor(key, entry)
        elif is_a(entry, "BytesStorageMetadata"):
            self.values.append(key)
        else:
            raise ValueError(f"{key!r}: {kind_of(entry)}")

    def _add_tensor(self, key: str, entry: Any) -> None:
        chunks = field_of(entry, "chunks")
        if not isinstance(chunks, list):
            raise ValueError(f"{key!r}: its chunks are {kind_of(chunks)}")
        count, add = 0, partial(self._add_shape, key)
        for chunk in chunks:
            if type(chunk) is Run:
                rows = slice(chunk.first, chunk.last)
                self.offset.append(self._offset[rows])
                self.size.append(self._size[rows])
                count += chunk.last - chunk.first
                self.runs += 1
            elif is_a(chunk, "ChunkStorageMetadata"):
                self.offset.append(add(chunk.state["offsets"]))
                self.size.append(add(chunk.state["sizes"]))
                count += 1
            else:
                raise ValueError(f"{key!r}: its chunks are {kind_of(chunk)}")
        self.keys.append(key)
        self.kinds.append(_dtype(field_of(entry, "properties")))
        self.shape.append(add(field_of(entry, "size")))
        self.count.append(np.array([count]))

    def _add_shape(self, key: str, shape: Any) -> Column:
        if type(shape) is not tuple or len(shape) > _MOST_AXES:
            raise ValueError(f"{key!r}: a shape or offset that is not a tuple of at most {_MOST_AXES} axes")
        if not {*map(type, shape)} <= {int}:
            raise ValueError(f"{key!r}: its sizes are not whole numbers")
        return np.array([self.scan_columns.shapes.add(shape)])

    def add_run(self, run: Run) -> None:
        """Add the tensors of a run: a range of rows in the columns that a scan of the pickle filled."""
        rows, scan_columns = slice(run.first, run.last), self.scan_columns
        if not all(scan_columns.tensor_key[rows]):
            raise ValueError("an empty key")
        edges = np.array(scan_columns.tensor_chunks[rows], dtype=np.int64)
        chunks = slice(int(edges[0, 0]), int(edges[-1, 1]))
        self.keys += scan_columns.tensor_key[rows]
        self.kinds += map(_dtype_from, scan_columns.tensor_dtype[rows])
        self.shape.append(self._shape[rows])
        self.count.append(edges[:, 1] - edges[:, 0])
        self.offset.append(self._offset[chunks])
        self.size.append(self._size[chunks])
        self.runs += 2


_NONE: Column = np.zeros(0, dtype=np.int64)


class _PlaceTable:
    """The places that `.metadata` lists: for chunks by tensor key and chunk offset, for plain values by name.

    A place is the file and the byte range of an archive.
    """

    def __init__(self, scan_columns: ScanColumns) -> None:
        self.scan_columns = scan_columns
        self.key: list[str] = []
        self.file: list[str] = []
        self.refusals: dict[int, str] = {}
        self.runs = 0
        # Its rows are: the chunk's offset as a row of the table of shapes, -1 for a value; byte; length.
        self._columns: list[Column] = []
        columns = (scan_columns.pair_offset, scan_columns.pair_byte, scan_columns.pair_length)
        self._places = np.stack([np.concatenate([_NONE, *part]) for part in columns])

    def add(self, index: Any, info: Any) -> None:
        """Add the place of an archive, its file and byte range, from Python objects that the pickle's reader returned.

        Args:
            index: Object of the class `MetadataIndex`: key of a tensor and offset of a chunk, or name of a value.
            info: Object of the class `_StorageInfo`: file, offset and length of the archive.
        """
        if not is_a(index, "MetadataIndex") or not is_a(info, "_StorageInfo"):
            raise ValueError(f"{kind_of(index)} and {kind_of(info)} in storage_data")
        state = info.state
        file, byte, length = state["relative_path"], state["offset"], state["length"]
        if type(file) is not str or type(byte) is not int or type(length) is not int:
            raise ValueError("a place that is not a file name, an offset and a length")
        if refusal := _refusal(file, state.get("transform_descriptors")):
            self.refusals[len(self.file)] = refusal
        key, offset = index.state["fqn"], index.state.get("offset")
        # A place with another kind of name is never looked up.
        is_known = type(key) is str and (offset is None or (type(offset) is tuple and {*map(type, offset)} <= {int}))
        row = -1 if offset is None or not is_known else self.scan_columns.shapes.add(offset)
        self.key.append(key if is_known else "")
        self.file.append(file)
        self._columns.append(np.array([[row], [byte], [length]], dtype=np.int64))

    def add_run(self, run: Run) -> None:
        """Add the places of a run: a range of rows in the columns that a scan of the pickle filled."""
        rows = slice(run.first, run.last)
        files = self.scan_columns.pair_file[rows]
        self.refusals |= {
            len(self.file) + at: _refusal(file, None) for at, file in enumerate(files) if _is_refused(file)
        }
        self.key += self.scan_columns.pair_key[rows]
        self.file += files
        self._columns.append(self._places[:, rows])
        self.runs += 2

    def columns(self) -> tuple[Column, ArchivePlaces]:
        """Return the offset of each place's chunk in its tensor, and the places.

        Returns:
            ``(row, places)``. An offset is given as a row of the table of shapes and offsets, -1 for the place of a
            plain value, int64 (places,).
        """
        offset, byte, length = np.concatenate([np.zeros((3, 0), dtype=np.int64), *self._columns], axis=1)
        return offset, ArchivePlaces(self.file, byte, length, self.refusals)


def _is_refused(file: str) -> bool:
    return file.endswith(".safetensors")


def _refusal(file: str, transforms: Any) -> str:
    if transforms:
        return f"it is stored through an extension, {transforms!r}"[:200]
    return "it is stored in safetensors, not as an archive of torch.save" if _is_refused(file) else ""


def _content(
    tensors: _TensorTable, place_table: _PlaceTable, flat: Any, paths: dict[str, tuple[str | int, ...]] | None
) -> MetadataFile:
    """Return the content of `.metadata`, after finding the archive of each chunk and value.

    Args:
        tensors: Tensors and values that the file lists.
        place_table: Places that the file lists: the file and byte range of each archive.
        flat: Megatron-Core's `mcore_data`, by key: original shapes of tensors stored as grids of flattened cells.
        paths: Path of each name in the nested state; None if paths are not stored.

    Raises:
        ValueError: The place of a chunk or value is missing, or shapes contradict each other.
    """
    axes, table = tensors.scan_columns.shapes.table(_MOST_NUMBERS)
    place_offset, places = place_table.columns()
    shape, count, offset, size = (
        np.concatenate([_NONE, *part]) for part in (tensors.shape, tensors.count, tensors.offset, tensors.size)
    )
    tensor = np.repeat(np.arange(count.size), count)
    for rows in (offset, size):
        other = np.flatnonzero(axes[rows] != axes[shape][tensor])
        if other.size:
            raise ValueError(f"{tensors.keys[tensor[other[0]]]!r}: its chunks have another number of axes")
    number = {key: at for at, key in enumerate(tensors.keys)}
    of_pair = np.fromiter((number.get(key, -1) for key in place_table.key), dtype=np.int64, count=len(place_table.key))
    pairs = np.flatnonzero((of_pair >= 0) & (place_offset >= 0))
    pairs = pairs[axes[place_offset[pairs]] == axes[shape[of_pair[pairs]]]]
    chunks = np.column_stack([tensor, table[offset]])
    place, first = match_pairs(np.column_stack([of_pair[pairs], table[place_offset[pairs]]]), chunks)
    if place.size and place.min() < 0:
        row = int(np.argmin(place))
        missing = tuple(table[offset[row], : int(axes[offset[row]])].tolist())
        raise ValueError(f"{tensors.keys[tensor[row]]!r}: the place of its chunk at {missing} is missing")
    unique_rows = without_repeated(table[size], axes[size], first)
    edge = np.searchsorted(tensor[unique_rows], np.arange(count.size + 1)).tolist()
    offsets, sizes, place = table[offset[unique_rows]], table[size[unique_rows]], pairs[place[unique_rows]]
    grids = {key: true for key in tensors.keys if (true := _grid_shape(key, flat)) is not None}
    wholes = _tuples(table[shape], axes[shape])
    entries = TensorEntries(number, tensors.kinds, wholes, edge, offsets, sizes, place, grids)
    return MetadataFile(entries, _values(tensors.values, place_table.key, place_offset), paths, places)


def _tuples(shapes: Column, axes: Column) -> list[Ints]:
    return [tuple(row[:length]) for row, length in zip(shapes.tolist(), axes.tolist(), strict=True)]


def _values(names: list[str], keys: list[str], offset: Column) -> dict[str, int]:
    """Return the position of each plain value's archive among all listed archives, by the value's name.

    If a value is listed several times, the last time counts.

    Args:
        names: Names of the values.
        keys: Key of the tensor, or name of the value, in each archive.
        offset: For each archive, the row of its chunk's offset in the table of shapes and offsets, or -1 if the archive
            holds a value. int64 (archives,).
    """
    row_of = {keys[row]: row for row in np.flatnonzero(offset < 0).tolist()}
    if absent := [key for key in names if key not in row_of]:
        raise ValueError(f"{absent[0]!r}: its place is missing")
    return {key: row_of[key] for key in names}


def _dtype(properties: Any) -> torch.dtype | None:
    state = properties.state if is_a(properties, "TensorProperties") else None
    return _dtype_from(state[0] if isinstance(state, tuple) and state else field_of(properties, "dtype"))


def _dtype_from(first: Any) -> torch.dtype | None:
    if isinstance(first, torch.dtype):
        return first
    if isinstance(first, Stub):
        return None
    raise ValueError(f"{kind_of(first)} in place of a dtype")


def _grid_shape(key: str, flat: Any) -> Ints | None:
    """Return the original shape of a tensor that is stored as a grid of flattened cells; None for other tensors.

    Megatron-Core 0.8 to 0.15 stored flat shards in this way.

    Args:
        key: Key of the tensor.
        flat: Megatron-Core's `mcore_data`: a dict that has the original shape by key, or None.
    """
    data = flat.get(key) if isinstance(flat, dict) else None
    shape = data.get("nd_reformulated_orig_global_shape") if isinstance(data, dict) else None
    if shape is None:
        return None
    shape = tuple(shape)
    if len(shape) > _MOST_AXES or not {*map(type, shape)} <= {int}:
        raise ValueError(f"{key!r}: its sizes are not whole numbers")
    return shape


def _paths(planner: Any) -> Paths | None:
    if planner is None:
        return None
    if not isinstance(planner, dict):
        raise ValueError(f"{kind_of(planner)} as planner_data")
    for path in planner.values():
        if (
            not isinstance(path, tuple)
            or not 0 < len(path) <= _DEEPEST
            or not {type(entry) for entry in path} <= {str, int}
        ):
            raise ValueError("a path of planner_data that does not consist of names and positions")
    return planner

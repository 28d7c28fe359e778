"""Verification of files by the hashes of their blocks, many blocks at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from ..core import limits
from ..core.geometry import Column
from ..errors import CheckpointingException, CorruptCheckpoint
from ..shell.storage import BLOCK_BYTES, BlockHasher, StoredFile, in_threads, threads_of
from ..shell.table import Checked, Checkpoint, Damage, Finding, Region, Unchecked, checked_name, read_checked
from ..shell.table.index import Index, ReadIndex, item_sizes, text_at
from ._opened import opened

# Tensors, objects and elements in a byte range of a file.

_MOST_REGIONS = 10_000
"""Largest number of chunks named for a damaged range; if it has more, as a missing file may, only keys are named."""


@dataclass(frozen=True, slots=True, eq=False)
class FileRows:
    """The chunks or objects of an index that have bytes in a file, in the order of their bytes.

    Attributes:
        row: Rows in the index, int64 (rows,).
        begin: First byte of each row, int64 (rows,).
        end: One past the last byte of each row, int64 (rows,).
        furthest: Running maximum of `end`, int64 (rows,).
    """

    row: Column
    begin: Column
    end: Column
    furthest: Column

    def between(self, begin: int, end: int) -> Column:
        """Return the rows in the index that have bytes in a range of the file, int64 (rows,)."""
        # `furthest` is searched because, unlike `end`, it ascends even if rows of a damaged index overlap.
        first = np.searchsorted(self.furthest, begin, side="right")
        last = np.searchsorted(self.begin, end, side="left")
        rows: Column = self.row[first:last][self.end[first:last] > begin]
        return rows


@dataclass(frozen=True, slots=True, eq=False)
class FileContents:
    """The tensors' chunks and the objects that an index places in one file.

    Attributes:
        chunks: Chunks with bytes in the file.
        objects: Objects with bytes in the file.
    """

    chunks: FileRows
    objects: FileRows

    @property
    def begin(self) -> int | None:
        """The first byte of any tensor or object, or None if there is none."""
        return min((int(rows.begin[0]) for rows in (self.chunks, self.objects) if rows.row.size), default=None)

    @property
    def end(self) -> int:
        """One past the last byte of any tensor or object."""
        return max((int(rows.furthest[-1]) for rows in (self.chunks, self.objects) if rows.row.size), default=0)


def file_contents(index: Index, number: int) -> FileContents:
    """Return the chunks and objects in one of an index's files, given the file's number."""
    return FileContents(_file_rows(index, "chunk", number), _file_rows(index, "object", number))


def _file_rows(index: Index, group: str, number: int) -> FileRows:
    file, byte, length = (getattr(index, f"{group}_{column}") for column in ("file", "byte", "length"))
    rows = np.flatnonzero((file == number) & (length > 0))
    rows = rows[np.argsort(byte[rows], kind="stable")]
    end = byte[rows] + length[rows]
    return FileRows(rows, byte[rows], end, np.maximum.accumulate(end))


def keys_between(index: Index, contents: FileContents, begin: int, end: int) -> tuple[str, ...]:
    """Return the keys of tensors, and the `unique_key` of objects, that have bytes in a range of a file."""
    numbers = np.unique(index.chunk_key[contents.chunks.between(begin, end)]).tolist()
    objects = np.sort(contents.objects.between(begin, end)).tolist()
    keys = [text_at(index.key_text, index.key_start, number) for number in numbers]
    return (*keys, *(text_at(index.object_text, index.object_start, number) for number in objects))


def regions_between(index: Index, contents: FileContents, begin: int, end: int) -> tuple[Region, ...]:
    """Return the parts of chunks that lie in a byte range of a file; () if there are too many to name."""
    rows = contents.chunks.between(begin, end).tolist()
    return tuple(_region(index, row, begin, end) for row in rows) if len(rows) <= _MOST_REGIONS else ()


def file_regions(index: Index, number: int) -> Callable[[int, int], tuple[Region, ...]]:
    """Return a function from a byte range of a file to the parts of chunks in it; () if there are too many to name."""
    return partial(regions_between, index, file_contents(index, number))


def _region(index: Index, row: int, begin: int, end: int) -> Region:
    number, byte = int(index.chunk_key[row]), int(index.chunk_byte[row])
    first_axis = index.chunk_shape.shape[1] - int(index.key_axes[number])
    offset, shape = (getattr(index, f"chunk_{name}")[row, first_axis:].tolist() for name in ("offset", "shape"))
    key = text_at(index.key_text, index.key_start, number)
    item = int(item_sizes(index)[index.key_dtype[number]])
    if item < 0:  # a dtype that this torch lacks: the whole chunk
        return Region(key, tuple(offset), _shift(offset, tuple(shape)))
    first = (max(begin, byte) - byte) // item
    last = -(-(min(end, byte + int(index.chunk_length[row])) - byte) // item) - 1
    start = int(index.chunk_start[row])
    if start >= 0:
        whole = tuple(at + size for at, size in zip(offset, shape, strict=True))
        return Region(key, tuple(offset), whole, flat=(start + first, start + last + 1))
    low, high = bounding_box(tuple(shape), first, last)
    return Region(key, _shift(offset, low), _shift(offset, high))


def _shift(offset: list[int], place: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(at + inner for at, inner in zip(offset, place, strict=True))


def bounding_box(shape: tuple[int, ...], first: int, last: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the smallest box around a range of elements of a box in row-major order.

    Consider the first axis along which the range's first and last element have different indices. Along earlier axes
    the result is one element wide. Along later axes it is whole, since a range that continues in the next row touches
    the end of one row and the beginning of the other.

    Args:
        shape: Shape of the box that contains the range.
        first: First element of the range.
        last: Last element of the range, inclusive.

    Returns:
        The first index along each axis, and one past the last index along each axis.

    Examples:
        >>> bounding_box((4, 6), 7, 9), bounding_box((4, 6), 7, 14)
        (((1, 1), (2, 4)), ((1, 0), (3, 6)))
    """
    low = tuple(int(at) for at in np.unravel_index(first, shape)) if shape else ()
    high = tuple(int(at) for at in np.unravel_index(last, shape)) if shape else ()
    differs = next((axis for axis in range(len(shape)) if low[axis] != high[axis]), len(shape))
    return (
        tuple(at if axis <= differs else 0 for axis, at in enumerate(low)),
        tuple(at + 1 if axis <= differs else shape[axis] for axis, at in enumerate(high)),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A part of a file that one thread checks; `first` is the number of its first block."""

    file: StoredFile
    first: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class _PieceResult:
    """The result for a piece: numbers of blocks with wrong hashes, or the error of reading it."""

    piece: _Piece
    blocks: Sequence[int] = ()
    error: str = ""


@dataclass(slots=True, eq=False)
class _Describer:
    """Descriptions of damage in byte ranges of an index's files, with memoised contents of the files."""

    index: Index
    contents: dict[int, FileContents] = field(default_factory=dict)

    def damage(self, number: int, what: str, begin: int, end: int) -> Damage:
        """Return damage of a byte range of a file, with the keys and regions in it."""
        if number not in self.contents:
            self.contents[number] = file_contents(self.index, number)
        contents = self.contents[number]
        keys = keys_between(self.index, contents, begin, end)
        regions = regions_between(self.index, contents, begin, end)
        name = self.index.file(number).name
        return Damage(name, what, begin, end, keys, regions)

    def block_damage(self, number: int, begin: int, end: int) -> Damage:
        """Return damage of a block with a wrong hash; its text says whether a header or padding is in the block too."""
        damage = self.damage(number, "the hash of a block differs", begin, end)
        contents = self.contents[number]
        first = end if contents.begin is None else contents.begin
        around = " (the file's header lies in it)" if begin < first else ""
        around = around or (" (it goes on after the file's last tensor)" if end > contents.end else "")
        return replace(damage, what=damage.what + around)


def verify_index(checkpoint: Checkpoint, read_index: ReadIndex) -> tuple[Finding, ...]:
    """Return the findings about the files of a checkpoint's index, as `files_findings` yields them.

    Args:
        checkpoint: Checkpoint to verify.
        read_index: Function that reads the index. If it finds the index corrupt, there are no findings about other
            files, since the index holds their hashes.
    """
    try:
        index = checkpoint.once(read_index)
    except CorruptCheckpoint as error:
        return (Damage(checked_name(checkpoint, "index"), str(error)),)
    return tuple(files_findings(checkpoint, index))


def whole_file_findings(checkpoint: Checkpoint, field: str) -> Iterator[Finding]:
    """Yield the finding about a file, such as the index, whose name and hash are in a field of metadata.json."""
    try:
        data, _ = read_checked(checkpoint, field)
    except CorruptCheckpoint as error:
        yield Damage(checked_name(checkpoint, field), str(error))
    else:
        checkpoint.options.progress(data.nbytes)
        yield Checked(checked_name(checkpoint, field), data.nbytes)


def files_findings(checkpoint: Checkpoint, index: Index) -> Iterator[Finding]:
    """Yield the findings about an index's files: checked bytes, wrong lengths, wrong hashes, files without hashes.

    Files are read by `LoadOptions.threads` threads, each of which checks one part of a file at a time.

    Args:
        checkpoint: Checkpoint with the files.
        index: Index that describes them.
    """
    describer = _Describer(index)
    pieces: list[_Piece] = []
    numbers: dict[str, int] = {}
    files = [index.file(number) for number in range(index.file_length.size)]
    storage = checkpoint.storage
    threads = threads_of(storage, checkpoint.options.threads)
    lengths = in_threads(storage.length, [file.name for file in files], threads)
    for number, (file, length) in enumerate(zip(files, lengths, strict=True)):
        numbers[file.name] = number
        if length != file.length:
            what = "no such file" if length is None else f"{length} bytes where {file.length} were saved"
            yield describer.damage(number, what, 0, file.length)
        elif file.hashes is None:
            if length:
                yield Unchecked(file.name, "it was saved without hashes, or by several ranks", length)
        else:
            yield Checked(file.name, file.length)
            # Files are checked in pieces, so that a single large file keeps all threads busy.
            pieces += _pieces(file)
    for result in in_threads(partial(_check_piece, checkpoint), pieces, threads):
        piece, number = result.piece, numbers[result.piece.file.name]
        if result.error:
            yield describer.damage(number, result.error, piece.begin, piece.end)
        for block in result.blocks:
            begin, end = block * BLOCK_BYTES, min(piece.file.length, (block + 1) * BLOCK_BYTES)
            yield describer.block_damage(number, begin, end)


def _pieces(file: StoredFile) -> Iterator[_Piece]:
    for begin in range(0, file.length, limits.CHECKED_BYTES):
        yield _Piece(file, begin // BLOCK_BYTES, begin, min(file.length, begin + limits.CHECKED_BYTES))


def _check_piece(checkpoint: Checkpoint, piece: _Piece) -> _PieceResult:
    try:
        hashes = _hashes(checkpoint, piece)
    except CheckpointingException as error:
        return _PieceResult(piece, error=str(error))
    assert piece.file.hashes is not None
    stored_hashes = piece.file.hashes[piece.first : -(-piece.end // BLOCK_BYTES)].tolist()
    return _PieceResult(
        piece, [block for block, value in enumerate(stored_hashes, piece.first) if hashes.get(block) != value]
    )


def _hashes(checkpoint: Checkpoint, piece: _Piece) -> dict[int, int]:
    hasher = BlockHasher(piece.file.length)
    # Each thread reads into one small buffer, so memory stays at a few MiB for files of any size.
    room = memoryview(bytearray(min(limits.STEP_BYTES, piece.end - piece.begin)))
    # The reader is told that the file ends with the piece, so that no request goes beyond it.
    with opened(checkpoint.storage, piece.file.name, piece.end) as reader:
        for byte in range(piece.begin, piece.end, limits.STEP_BYTES):
            part = room[: min(limits.STEP_BYTES, piece.end - byte)]
            reader.read_into(byte, [part])
            hasher.update(part, byte)
            checkpoint.options.progress(part.nbytes)
    return hasher.hashes

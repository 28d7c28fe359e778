"""Repeating parts of `.metadata`: regular expressions of records' opcodes, and columns of whole numbers.

NumPy decodes many short byte ranges of the pickle side by side. A memo number is the index under which a pickle keeps
a value for later references.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ...kit import Column
from ..pickles import Irregular

# In the patterns, one-byte opcodes stand for themselves: ) \x81 makes an object, } ( ... u its state, b fills it.

_REF = rb"(?:h.|j.{4})"
_INT = rb"(?:K.|M..|J.{4}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"
_TEXT = (
    rb"(?:h.|j.{4}|\x8c(?:"
    + b"|".join(re.escape(bytes([size])) + b".{%d}" % size for size in range(1, 256))
    + rb")\x94)"
)


@dataclass(frozen=True, slots=True, eq=False)
class Patterns:
    """Regular expressions for records of `.metadata`. Brackets list groups, separated by commas; a "field" is its name.

    Attributes:
        memoized: True if tuples and objects have memo numbers, as `pickle` writes them; our own writer omits these.
        chunk: Chunk of a tensor: (class + first field, offset, second field, shape).
        pair: Place of a chunk or value: (MetadataIndex + first field, key, second field, third field, offset,
            _StorageInfo + first field, file, second field, byte, third field, length).
        tensor: Tensor: (key, class + first field, properties, second field, shape, third field, chunks).
        kind: Properties of a tensor: (class, dtype, layout, its argument, memory format, its argument).
    """

    memoized: bool
    chunk: re.Pattern[bytes]
    pair: re.Pattern[bytes]
    tensor: re.Pattern[bytes]
    kind: re.Pattern[bytes]


@cache
def patterns_of(memoized: bool) -> Patterns:
    r"""Return the patterns for records of `.metadata`. If `memoized`, their tuples and objects have memo numbers.

    Examples:
        >>> patterns_of(False).kind.fullmatch(b"h\x07").group(1)
        b'h\x07'
    """
    number = rb"\x94" if memoized else b""
    shape = rb"REF(?:(?:\)|\((?:INT){4,64}t~|(?:INT){1,3}[\x85-\x87]~)\x85~R~)?"
    begin = rb"REF\)\x81~}~\(REF"
    chunk = rb"REF\)\x81~}~\(REF(?:SHAPE)REF(?:SHAPE)ub"
    # The first byte alone says which optional parts follow, so that no match is ambiguous.
    layout, memory = rb"REF(?:REF\x85~R~)?", rb"REF(?:INT\x85~R~)?"
    properties = rb"REF(?:\)\x81~\(REF" + layout + rb"[\x88\x89]" + memory + rb"[\x88\x89]t~b)?"
    templates = {
        "chunk": rb"(" + begin + rb")(SHAPE)(REF)(SHAPE)ub",
        "pair": rb"(BEGIN)(TEXT)(REF)(?:N|INT)(REF)(N|SHAPE)ub(BEGIN)(TEXT)(REF)(INT)(REF)(INT)ub",
        "tensor": rb"(TEXT)(BEGIN)(PROPERTIES)(REF)(SHAPE)(REF)\]~(CHUNKa|\((?:CHUNK)+e)ub",
        "kind": rb"(REF)(?:\)\x81~\((REF)(REF)(REF\x85~R~)?[\x88\x89](REF)(INT\x85~R~)?[\x88\x89]t~b)?",
    }
    words = ((b"CHUNK", chunk), (b"BEGIN", begin), (b"PROPERTIES", properties), (b"SHAPE", shape))
    # Replacements that contain arbitrary bytes come last.
    all_words = (*words, (b"~", number), (b"REF", _REF), (b"INT", _INT), (b"TEXT", _TEXT))
    patterns = {}
    for name, pattern in templates.items():
        for word, meaning in all_words:
            pattern = pattern.replace(word, meaning)
        patterns[name] = re.compile(pattern, re.DOTALL)
    return Patterns(memoized, **patterns)


REFERENCE = re.compile(_REF, re.DOTALL)


def scanner(pattern: re.Pattern[bytes], data: bytes, at: int) -> Callable[[], re.Match[bytes] | None]:
    """Return a function that returns the next match or None. A match begins where the last ended, the first at `at`."""
    return pattern.scanner(data, at).match  # type: ignore[attr-defined,no-any-return]


def reference(code: bytes) -> int:
    r"""Return the memo number that an opcode refers to.

    Examples:
        >>> reference(b"h\x07"), reference(b"j\x00\x01\x00\x00")
        (7, 256)
    """
    return int.from_bytes(code[1:], "little")


Ints = tuple[int, ...]
Bytes = NDArray[np.uint8]

_MOST_SORTINGS = 64
_PAST = 16  # Padding after the last opcode lets the code look at further bytes without a check.


def _widths() -> Column:
    """Return the fixed length of each opcode that pushes an integer, in bytes; 0 for other opcodes, int64 (256,)."""
    widths = np.zeros(256, dtype=np.int64)
    widths[[ord("K"), ord("M"), ord("J"), 0x8A]] = 2, 3, 5, 2  # The length of LONG1's argument follows its opcode.
    return widths


_WIDTH = _widths()


def joined(parts: Sequence[bytes]) -> tuple[Bytes, Column, Column]:
    """Return byte ranges joined to one padded buffer, and the begin and end of each in it, int64 (ranges,)."""
    buffer = np.frombuffer(b"".join((*parts, bytes(_PAST))), dtype=np.uint8)
    end = np.cumsum(np.fromiter(map(len, parts), dtype=np.int64, count=len(parts)))
    return buffer, np.concatenate(([0], end[:-1])) if parts else end, end


def numbers_at(buffer: Bytes, at: Column) -> tuple[Column, Column]:
    r"""Return the whole number at each offset, and the length of its opcode, 0 if it isn't the opcode of a number.

    Examples:
        >>> buffer, start, _ = joined([b"K\x07", b"J\xfe\xff\xff\xff", b"t"])
        >>> [column.tolist() for column in numbers_at(buffer, start)]
        [[7, -2, 0], [2, 5, 0]]
    """
    code = buffer[at]
    width = _WIDTH[code]
    long = code == 0x8A
    size = np.where(long, buffer[at + 1], width - 1)
    width = width + np.where(long, size, 0)
    first = at + 1 + long
    most = int(size.max(initial=0))
    if most > 8:
        raise Irregular("a number of more than 8 bytes")
    bits = np.zeros(at.size, dtype=np.uint64)
    for byte in range(most):
        there = byte < size
        bits[there] |= buffer[first[there] + byte].astype(np.uint64) << np.uint64(8 * byte)
    # Of these opcodes, J and LONG1 are signed; a shift to the top and back extends the sign.
    spare = np.where(long | (code == ord("J")), 64 - 8 * size, 0).clip(0, 63).astype(np.uint64)
    value = (bits << spare).view(np.int64) >> spare.astype(np.int64)
    return np.where(width > 0, value, 0), width


def references_at(buffer: Bytes, at: Column) -> tuple[Column, Column]:
    """Return the memo numbers that the opcodes at some offsets refer to, and the length of each opcode."""
    long = buffer[at] == ord("j")
    number = buffer[at + 1].astype(np.int64)
    for byte in range(1, 4):
        number[long] |= buffer[at[long] + 1 + byte].astype(np.int64) << (8 * byte)
    return number, np.where(long, 5, 2)


def numbers(parts: Sequence[bytes]) -> Column:
    """Return the whole number in each byte range, int64 (ranges,); a byte range is one pickle opcode."""
    buffer, start, _ = joined(parts)
    return numbers_at(buffer, start)[0]


@dataclass(slots=True)
class Shapes:
    """A table of shapes and offsets, with their memo numbers. Columns "in parts" are lists of arrays to concatenate.

    Attributes:
        axes: Count of numbers in each row, int64 (rows,), in parts.
        values: Rows, left-aligned, int64 (rows, axes), in parts.
        number: Memo number of each row, ascending, -1 for a row without one, int64 (rows,), in parts.
        single: Tuples that were added one by one, and aren't in a part yet.
        length: Number of rows.
        lookup: Memo numbers, ascending, and their rows; valid while `is_sorted`.
        is_sorted: True if no row with a memo number was added since the last sorting.
        sortings: Count of sortings so far.
    """

    axes: list[Column]
    values: list[Column]
    number: list[Column]
    single: list[Ints]
    length: int = 0
    lookup: tuple[Column, Column] = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    is_sorted: bool = True
    sortings: int = 0

    def add(self, shape: Ints) -> int:
        """Add a shape, and return its row."""
        self.single.append(shape)
        self.length += 1
        return self.length - 1

    def extend(self, axes: Column, values: Column, number: Column) -> Column:
        """Add shapes by their axis counts, left-aligned sizes and memo numbers (-1: none), and return their rows."""
        self._flush()
        self.axes.append(axes)
        self.values.append(values)
        self.number.append(number)
        self.is_sorted &= not (number >= 0).any()
        rows = np.arange(self.length, self.length + axes.size)
        self.length += axes.size
        return rows

    def _flush(self) -> None:
        if not self.single:
            return
        axes = np.fromiter(map(len, self.single), dtype=np.int64, count=len(self.single))
        values = np.zeros((axes.size, int(axes.max(initial=0))), dtype=np.int64)
        flat = [number for shape in self.single for number in shape]
        values[np.arange(values.shape[1]) < axes[:, None]] = np.array(flat, dtype=np.int64)
        self.single.clear()
        self.axes.append(axes)
        self.values.append(values)
        self.number.append(np.full(axes.size, -1))

    def of_number(self, number: int) -> Ints:
        """Return the shape that the pickle keeps under a memo number; raise KeyError if there is none."""
        row = int(self.rows_of(np.array([number]))[0])
        for axes, values in zip(self.axes, self.values, strict=True):
            if 0 <= row < axes.size:
                return tuple(values[row, : int(axes[row])].tolist())
            row -= axes.size
        raise KeyError(number)

    def rows_of(self, number: Column) -> Column:
        """Return the row of each memo number, -1 for a number without a row."""
        self._flush()
        if not self.is_sorted:
            self.sortings += 1
            if self.sortings > _MOST_SORTINGS:
                raise Irregular("too many references to shapes that were just added")
            memo_numbers = np.concatenate([np.zeros(0, dtype=np.int64), *self.number])
            order = np.argsort(memo_numbers, kind="stable")
            order = order[memo_numbers[order] >= 0]
            self.lookup, self.is_sorted = (memo_numbers[order], order), True
        memo_numbers, row = self.lookup
        if not memo_numbers.size:
            return np.full(number.size, -1)
        at = np.searchsorted(memo_numbers, number).clip(0, memo_numbers.size - 1)
        return np.where(memo_numbers[at] == number, row[at], -1)

    def table(self, most: int) -> tuple[Column, Column]:
        """Return each shape's axis count, and an array of the padded shapes; ValueError if its size exceeds `most`."""
        self._flush()
        width = max([1, *(part.shape[1] for part in self.values)])
        if self.length * width > most:
            raise ValueError(f"{self.length} shapes of too many axes")
        values = np.zeros((self.length, width), dtype=np.int64)
        begin = 0
        for part in self.values:
            values[begin : begin + len(part), : part.shape[1]] = part
            begin += len(part)
        return np.concatenate([np.zeros(0, dtype=np.int64), *self.axes]), values


def no_shapes() -> Shapes:
    """Return an empty table."""
    return Shapes([], [], [], [])


def shapes_in(parts: Sequence[bytes], memoized: bool, is_size: Callable[[int], bool]) -> PickledShapes:
    """Return the shapes in some byte ranges: references to known shapes, or calls of torch.Size with a tuple.

    Args:
        parts: Bytes of each range.
        memoized: True if tuples and results of torch.Size have memo numbers.
        is_size: Function that returns whether a memo number refers to torch.Size.
    """
    buffer, start, end = joined(parts)
    number, width = references_at(buffer, start)
    is_new = start + width < end
    rows = np.flatnonzero(is_new)
    if not all(map(is_size, np.unique(number[rows]).tolist())):
        raise Irregular("a shape that is not made by torch.Size")
    axes, values, opening = _tuples_at(buffer, (start + width)[rows])
    counts = np.zeros(len(parts), dtype=np.int64)
    if memoized:
        counts[rows] = 2 + (opening != ord(")"))
    return PickledShapes(is_new, number, axes, values, counts)


def _tuples_at(buffer: Bytes, at: Column) -> tuple[Column, Column, Bytes]:
    """Return, for the integer tuple at each offset, its entry count, its zero-padded entries and its first opcode."""
    opening = buffer[at]
    at = at + (opening == ord("("))
    columns: list[Column] = []
    axes = np.zeros(at.size, dtype=np.int64)
    while True:
        values, lengths = numbers_at(buffer, at)
        if not lengths.any():
            break
        columns.append(values)
        axes += lengths > 0
        at = at + lengths
    # For 1 to 3 entries, the closing opcode says how many it takes, which must be all of them.
    closing = buffer[at].astype(np.int64)
    if ((opening != ord("(")) & (opening != ord(")")) & (closing - 0x84 != axes)).any():
        raise Irregular("a tuple of fewer or more entries than those before its opcode")
    return axes, np.stack(columns, axis=1) if columns else np.zeros((at.size, 0), dtype=np.int64), opening


@dataclass(frozen=True, slots=True, eq=False)
class PickledShapes:
    """Shapes as they are in the pickle: new ones, and references to earlier ones.

    Attributes:
        is_new: True for a new shape, which is written as a tuple; False for a reference, bool (shapes,).
        number: Memo number of the earlier shape; for a new shape, that of the class torch.Size, int64 (shapes,).
        axes: Number of axes of each new shape, int64 (new,).
        values: Entries of new shapes, left-aligned, int64 (new, axes).
        memo_counts: Count of memo numbers that a shape takes up; the last is the shape's own, int64 (shapes,).
    """

    is_new: NDArray[np.bool_]
    number: Column
    axes: Column
    values: Column
    memo_counts: Column

    def rows(self, shapes: Shapes, base: Column, shape_of: Callable[[int], Ints]) -> Column:
        """Return the row of each shape in a table, after adding those that it lacks, int64 (shapes,).

        Args:
            shapes: Table of shapes.
            base: Number of values in the pickle's memo before each shape, int64 (shapes,).
            shape_of: Function that returns an earlier shape, not in the table, by its memo number, or raises.
        """
        rows = np.full(self.is_new.size, -1)
        new = np.flatnonzero(self.is_new)
        new_numbers = base[new] + self.memo_counts[new] - 1
        rows[new] = shapes.extend(self.axes, self.values, np.where(self.memo_counts[new] > 0, new_numbers, -1))
        old = np.flatnonzero(~self.is_new)
        if old.size:
            if (self.number[old] >= base[old]).any():
                raise Irregular("a reference to a later value")
            rows[old] = shapes.rows_of(self.number[old])
            for row in old[rows[old] < 0].tolist():
                rows[row] = shapes.add(shape_of(int(self.number[row])))
        return rows


# This section finds the places of chunks.


def match_pairs(pairs: Column, chunks: Column) -> tuple[Column, Column]:
    """Return indices of rows equal to each row of `chunks`: the last one in `pairs` (-1: none), the first in `chunks`.

    Examples:
        >>> pairs, chunks = np.array([[0, 4], [0, 0], [0, 4]]), np.array([[0, 0], [0, 4], [0, 0], [1, 0]])
        >>> [column.tolist() for column in match_pairs(pairs, chunks)]
        [[1, 2, 1, -1], [0, 1, 0, 3]]
    """
    rows = np.concatenate([pairs, chunks])
    if pairs.shape == chunks.shape and (pairs == chunks).all() and not _repeats(chunks):
        return np.arange(len(pairs)), np.arange(len(chunks))
    # After sorting, equal rows are neighbours: pairs come before chunks, and both keep their order.
    order = np.lexsort(rows.T[::-1])
    rows = rows[order]
    begins = np.ones(order.size, dtype=np.bool_)
    begins[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    group = np.maximum.accumulate(np.where(begins, np.arange(order.size), 0))
    is_chunk = order >= len(pairs)
    last_pair = np.maximum.accumulate(np.where(is_chunk, -1, np.arange(order.size)))
    place = np.where(last_pair >= group, order[last_pair], -1)
    # The first chunk of a group comes right after the group's last pair.
    first = order[np.maximum(group, last_pair + 1).clip(max=order.size - 1)] - len(pairs)
    by_chunk = np.empty((2, len(chunks)), dtype=np.int64)
    by_chunk[:, order[is_chunk] - len(pairs)] = place[is_chunk], first[is_chunk]
    return by_chunk[0], by_chunk[1]


def _repeats(rows: Column) -> bool:
    """Return whether rows aren't in strictly ascending order, and so may repeat."""
    later, earlier = rows[1:], rows[:-1]
    differs = later != earlier
    first = differs.argmax(axis=1)
    at = np.arange(len(later))
    ascends: bool = (later[at, first] > earlier[at, first]).all()
    return not ascends


def without_repeated(sizes: Column, axes: Column, first: Column) -> Column:
    """Return rows of chunks such that each tensor and offset occurs once; a chunk with elements is preferred.

    `sizes` has the chunks' padded shapes, `axes` their axis counts, `first` the first row with equal tensor and offset.
    """
    rows: Column = np.arange(first.size)
    again = np.flatnonzero(first != rows)
    if not again.size:
        return rows
    row_of = rows.copy()
    for row in again.tolist():
        if 0 not in sizes[row, : axes[row]]:
            row_of[first[row]] = row
    unique_rows: Column = row_of[first == rows]
    return unique_rows

"""The scan of `.metadata`: it reads regular parts straight into columns, so that a million chunks make few objects.

Nearly all of the file repeats three records: a tensor, a chunk of a tensor, and the place of a chunk. The place is a
file, and an offset and length in it. Regular expressions match these records, opcode by opcode, after the safe reader
of pickles has read the first of a kind.

A pickle numbers the values that it may refer to later (memo numbers). References are looked up by these numbers in the
reader's memo. The scan leaves everything unexpected to the reader, which decides whether the file is sound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from typing import Any

import numpy as np

from ...kit import Column
from ..pickles import Constructor, Irregular, Machine, Run, Stub
from ._pickled_columns import (
    REFERENCE,
    Ints,
    Patterns,
    PickledShapes,
    Shapes,
    no_shapes,
    numbers,
    patterns_of,
    reference,
    scanner,
    shapes_in,
)

_LEAST, _MOST, _SCANNED_BYTES = 1_000, 65_536, 2**24
"""Bounds of the bytes and records scanned at once: fewer bytes are read faster one by one, more would fill memory."""

_MOST_SHORT = 100_000
"""Upper bound of the byte ranges that were too short; after that many, the file counts as irregular."""


@dataclass(slots=True)
class ScanColumns:
    """Columns read by a scan, in three tables: chunks, pairs and tensors.

    A pair names a chunk of a tensor, or a value without chunks, and the place of its bytes. Columns "in parts" are
    lists of arrays, which are concatenated at the end.

    Attributes:
        shapes: Table of all shapes and offsets; a "shape row" below is a row of this table.
        chunk_offset: Shape row of each chunk's offset, (chunks,), in parts.
        chunk_shape: Shape row of each chunk's shape, (chunks,), in parts.
        chunks: Number of chunks.
        pair_key: Key of each pair's tensor or value, (pairs,).
        pair_offset: Shape row of the offset of each pair's chunk, -1 for a value, (pairs,), in parts.
        pair_file: File of each pair's bytes, (pairs,).
        pair_byte: Offset of each pair's bytes in the file, (pairs,), in parts.
        pair_length: Number of each pair's bytes, (pairs,), in parts.
        tensor_key: Key of each tensor, (tensors,).
        tensor_dtype: Dtype of each tensor, as the file has it, (tensors,).
        tensor_shape: Shape row of each tensor's shape, (tensors,), in parts.
        tensor_chunks: Row of each tensor's first chunk, and one past the row of its last, (tensors,).
        runs: Number of `Run` placeholders on the reader's stack; each stands for consecutive rows of one table.
    """

    shapes: Shapes = field(default_factory=no_shapes)
    chunk_offset: list[Column] = field(default_factory=list)
    chunk_shape: list[Column] = field(default_factory=list)
    chunks: int = 0
    pair_key: list[str] = field(default_factory=list)
    pair_offset: list[Column] = field(default_factory=list)
    pair_file: list[str] = field(default_factory=list)
    pair_byte: list[Column] = field(default_factory=list)
    pair_length: list[Column] = field(default_factory=list)
    tensor_key: list[str] = field(default_factory=list)
    tensor_dtype: list[Any] = field(default_factory=list)
    tensor_shape: list[Column] = field(default_factory=list)
    tensor_chunks: list[tuple[int, int]] = field(default_factory=list)
    runs: int = 0


class MetadataScan:
    """The scan of one `.metadata`, called by the reader of the pickle.

    Args:
        classes: Value of each class or function that the file may name, by module and qualified name; the reader has
            the same ones.
    """

    def __init__(self, classes: Mapping[tuple[str, str], Any]) -> None:
        self.columns = ScanColumns()
        self._names = {
            constructor: name for (_, name), constructor in classes.items() if isinstance(constructor, Constructor)
        }
        self._short = 0
        self._kinds: dict[str, Callable[[Machine, int], int]] = {
            "ChunkStorageMetadata": self._chunks,
            "_StorageInfo": self._pairs,
            "TensorStorageMetadata": self._tensors,
        }

    def find(self, number: int) -> Any:
        """Return a shape that the scan read, by its memo number."""
        return self.columns.shapes.of_number(number)

    def __call__(self, machine: Machine, at: int) -> int:
        value = machine.stack[-1]
        kind = self._kinds.get(value.type_name.rpartition(".")[2]) if type(value) is Stub else None
        return at if kind is None or self._short > _MOST_SHORT else kind(machine, at)

    def _chunks(self, machine: Machine, at: int) -> int:
        if not machine.metastack or type(machine.metastack[-1][-1]) is not list:
            return at
        rows, end, patterns = self._records(machine, at, "chunk", b"e(")
        if rows:
            base = self._base(machine)
            columns = _ChunkColumns(self, machine, patterns, rows)
            first = columns.keep(base + _before(columns.memo_counts))
            self._push(machine, [Run(first, first + len(rows))], int(columns.memo_counts.sum()))
        return end

    def _pairs(self, machine: Machine, at: int) -> int:
        if not self._in_dict(machine):
            return at
        rows, end, patterns = self._records(machine, at, "pair", b"u(")
        if rows:
            self._push(machine, *self._keep_pairs(machine, patterns, rows))
        return end

    def _tensors(self, machine: Machine, at: int) -> int:
        if not self._in_dict(machine):
            return at
        rows, end, patterns = self._records(machine, at, "tensor", b"u(")
        if rows:
            self._push(machine, *self._keep_tensors(machine, patterns, rows))
        return end

    def _in_dict(self, machine: Machine) -> bool:
        """Return whether the reader is inside a dict and its stack holds complete pairs of a key and a value."""
        return bool(machine.metastack) and type(machine.metastack[-1][-1]) is dict and len(machine.stack) % 2 == 0

    def _records(
        self, machine: Machine, at: int, kind: str, batches: bytes
    ) -> tuple[list[tuple[bytes, ...]], int, Patterns]:
        """Return the fields of consecutive records, the position after them, and the `Patterns` that match them.

        If the records have fewer than `_LEAST` bytes, the list is empty and the position is `at`.

        Args:
            machine: Reader of the file.
            at: Position of the first record.
            kind: Kind of the records: "chunk", "pair" or "tensor".
            batches: Opcodes between two batches of records; `pickle` writes a long list or dict in batches.
        """
        data, end = machine.data, at
        patterns = patterns_of(True)
        if getattr(patterns, kind).match(data, at) is None:
            patterns = patterns_of(False)
        pattern = getattr(patterns, kind)
        rows: list[tuple[bytes, ...]] = []
        while len(rows) < _MOST:
            again = end + 2 * (data[end : end + 2] == batches)
            before = len(rows)
            for match in iter(scanner(pattern, data, again), None):
                rows.append(match.groups())
                end = match.end()
                if len(rows) >= _MOST or end - at >= _SCANNED_BYTES:
                    break
            if len(rows) == before or end - at >= _SCANNED_BYTES:
                break
        if end - at < _LEAST:
            self._short += 1
            return [], at, patterns
        return rows, end, patterns

    def _push(self, machine: Machine, runs: list[Run], count: int) -> None:
        machine.stack += runs
        machine.memo.taken += count
        self.columns.runs += len(runs)

    def _base(self, machine: Machine) -> int:
        return len(machine.memo) + machine.memo.taken

    # These methods look up references of records.

    def check(self, machine: Machine, codes: Sequence[bytes], *expected: str) -> None:
        """Raise unless the references in records lead to the expected classes and strings.

        Args:
            machine: Reader of the file, whose memo has the values behind the references.
            codes: Opcodes from each record, with one reference for each expected name.
            expected: Names of classes, and strings, in the order of the references.

        Raises:
            Irregular: A record has a reference to another value, or more or fewer references.
        """
        for code in set(codes):
            values = [machine.memo[reference(opcode)] for opcode in REFERENCE.findall(code)]
            # Strings come first: a class is never equal to a string.
            names = [value if type(value) is str else self._names.get(value) for value in values]
            if names != list(expected) or any(map(_is_class_name, expected, values)):
                raise Irregular(f"{names} in place of {expected}")

    def is_size(self, machine: Machine, number: int) -> bool:
        """Return whether a memo number refers to torch.Size."""
        value = machine.memo[number]
        return type(value) is Constructor and self._names.get(value) == "Size"

    def shape(self, machine: Machine, number: int) -> Ints:
        """Return a shape from the reader's own memo, by its memo number.

        Args:
            machine: Reader of the file.
            number: Memo number of the shape.

        Raises:
            Irregular: The memo has no shape with this number.
        """
        value = dict.get(machine.memo, number)
        if type(value) is not tuple or {*map(type, value)} - {int}:
            raise Irregular("a reference to something in place of a shape")
        return value

    def texts(self, machine: Machine, codes: Sequence[bytes], base: Sequence[int]) -> list[str]:
        """Return the string of each opcode, and add new strings to the reader's memo.

        An opcode contains a new string, or refers to an earlier one.

        Args:
            machine: Reader of the file.
            codes: Opcode of each string.
            base: Number of values in the pickle's memo before each opcode; a new string gets this memo number.
        """
        text_of: dict[bytes, str] = {}
        texts = []
        for code, number in zip(codes, base, strict=True):
            text = text_of.get(code)
            if text is None:
                if code[0] == 0x8C:
                    text = str(code[2:-1], "utf-8", "surrogatepass")
                    machine.memo[number] = text
                    # The memo itself counts it from now on.
                    machine.memo.taken -= 1
                else:
                    target = reference(code)
                    text = machine.memo[target]
                    if type(text) is not str or target >= number:
                        raise Irregular("a reference to something in place of a string")
                    text_of[code] = text
            texts.append(text)
        return texts

    # These methods keep the two kinds of records in dicts.

    def _keep_pairs(self, machine: Machine, patterns: Patterns, rows: list[tuple[bytes, ...]]) -> tuple[list[Run], int]:
        index, key, second, third, offset, information, file, fourth, byte, fifth, length = zip(*rows, strict=True)
        self.check(machine, index, "MetadataIndex", "fqn")
        self.check(machine, second, "index")
        self.check(machine, third, "offset")
        self.check(machine, information, "_StorageInfo", "relative_path")
        self.check(machine, fourth, "offset")
        self.check(machine, fifth, "length")
        there = np.flatnonzero([code != b"N" for code in offset])
        shapes = shapes_in([code for code in offset if code != b"N"], patterns.memoized, partial(self.is_size, machine))
        of_shape = np.zeros(len(rows), dtype=np.int64)
        of_shape[there] = shapes.memo_counts
        # The file has this order: an object and its state, the key, the offset, an object and its state, the name.
        scan_columns, of_object = self.columns, 2 * patterns.memoized
        at_shape = of_object + _are_new(key)
        total = at_shape + of_shape + of_object + _are_new(file)
        base = self._base(machine) + _before(total)
        first = len(scan_columns.pair_key)
        scan_columns.pair_key += self.texts(machine, key, (base + of_object).tolist())
        column = np.full(len(rows), -1)
        column[there] = shapes.rows(scan_columns.shapes, (base + at_shape)[there], partial(self.shape, machine))
        scan_columns.pair_file += self.texts(machine, file, (base + at_shape + of_shape + of_object).tolist())
        scan_columns.pair_offset.append(column)
        scan_columns.pair_byte.append(numbers(byte))
        scan_columns.pair_length.append(numbers(length))
        last = len(scan_columns.pair_key)
        return [Run(first, last), Run(first, last)], int(total.sum())

    def _keep_tensors(
        self, machine: Machine, patterns: Patterns, rows: list[tuple[bytes, ...]]
    ) -> tuple[list[Run], int]:
        key, begin, properties, second, shape, third, regions = zip(*rows, strict=True)
        self.check(machine, begin, "TensorStorageMetadata", "properties")
        self.check(machine, second, "size")
        self.check(machine, third, "chunks")
        base = self._base(machine)
        kinds = {code: self._kind(machine, code, patterns, base) for code in set(properties)}
        shapes = shapes_in(shape, patterns.memoized, partial(self.is_size, machine))
        chunks = [
            [match.groups() for match in iter(scanner(patterns.chunk, region, region[0] == ord("(")), None)]
            for region in regions
        ]
        counts = np.fromiter(map(len, chunks), dtype=np.int64, count=len(rows))
        edges = np.concatenate(([0], np.cumsum(counts)))
        columns = _ChunkColumns(self, machine, patterns, [*chain.from_iterable(chunks)])
        # The file has this order: the key, an object and its state, properties, the shape, the list, its chunks.
        of_chunks = np.concatenate(([0], np.cumsum(columns.memo_counts)))[edges]
        of_properties = np.fromiter((kinds[code][1] for code in properties), dtype=np.int64, count=len(rows))
        at_shape = _are_new(key) + 2 * patterns.memoized + of_properties
        at_chunks = at_shape + shapes.memo_counts + patterns.memoized
        total = at_chunks + np.diff(of_chunks)
        start = base + _before(total)
        scan_columns = self.columns
        first = len(scan_columns.tensor_key)
        scan_columns.tensor_key += self.texts(machine, key, start.tolist())
        scan_columns.tensor_dtype += [kinds[code][0] for code in properties]
        scan_columns.tensor_shape.append(
            shapes.rows(scan_columns.shapes, start + at_shape, partial(self.shape, machine))
        )
        before = np.repeat(start + at_chunks - of_chunks[:-1], counts) + _before(columns.memo_counts)
        scan_columns.tensor_chunks += pairwise((columns.keep(before) + edges).tolist())
        last = len(scan_columns.tensor_key)
        return [Run(first, last), Run(first, last)], int(total.sum())

    def _kind(self, machine: Machine, code: bytes, patterns: Patterns, base: int) -> tuple[Any, int]:
        """Return the dtype in a tensor's properties, and the count of memo numbers that the properties use."""
        match = patterns.kind.fullmatch(code)
        cls, dtype, layout, of_layout, memory, of_memory = match.groups() if match else (b"",) * 6

        def value(code: bytes) -> Any:
            if reference(code) >= base:
                raise Irregular("a reference to a later value")
            return machine.memo[reference(code)]

        if dtype is None:
            return _dtype_of(value(cls)), 0
        functions = [value(function) for function, arguments in ((layout, of_layout), (memory, of_memory)) if arguments]
        if self._names.get(value(cls)) != "TensorProperties" or not {*map(self._names.get, functions)} <= _FUNCTIONS:
            raise Irregular("properties of other classes")
        for opcode in (layout, memory, *REFERENCE.findall(of_layout or b"")[:1]):
            value(opcode)
        return value(dtype), (2 + 2 * len(functions)) * patterns.memoized


_FUNCTIONS = {"_get_layout", "_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING"}


def _dtype_of(properties: Any) -> Any:
    """Return the dtype in a tensor's properties; `properties` is the stub that the safe reader made."""
    if type(properties) is not Stub or properties.type_name.rpartition(".")[2] != "TensorProperties":
        raise Irregular("no properties")
    if type(properties.state) is not tuple or not properties.state:
        raise Irregular("properties with other values")
    return properties.state[0]


def _is_class_name(name: str, value: Any) -> bool:
    """Return whether a value has the wrong type for an expected name: a string for a class, or no string for a field.

    A name that begins with a capital letter or an underscore is that of a class; any other is that of a field.
    """
    return (name[0].isupper() or name.startswith("_")) == (type(value) is str)


def _before(counts: Column) -> Column:
    """Return, for each record, the count of memo numbers used by the records before it, int64 (records,)."""
    return np.cumsum(counts) - counts


def _are_new(texts: Sequence[bytes]) -> Column:
    return np.fromiter((code[0] == 0x8C for code in texts), dtype=np.int64, count=len(texts))


class _ChunkColumns:
    """Scanned chunks as columns. Their memo numbers depend on the records before them, and are passed to `keep`."""

    def __init__(self, scan: MetadataScan, machine: Machine, patterns: Patterns, rows: list[tuple[bytes, ...]]) -> None:
        begin, offset, second, shape = zip(*rows, strict=True) if rows else ((), (), (), ())
        scan.check(machine, begin, "ChunkStorageMetadata", "offsets")
        scan.check(machine, second, "sizes")
        shapes_of = partial(shapes_in, memoized=patterns.memoized, is_size=partial(scan.is_size, machine))
        self.scan, self.machine = scan, machine
        self.offset: PickledShapes = shapes_of(offset)
        self.shape: PickledShapes = shapes_of(shape)
        self.of_object = 2 * patterns.memoized
        self.memo_counts = self.of_object + self.offset.memo_counts + self.shape.memo_counts

    def keep(self, base: Column) -> int:
        """Add these chunks to the scan's table of chunks, and return the first one's row.

        Args:
            base: Number of values in the pickle's memo before each chunk, int64 (chunks,).
        """
        scan_columns, shape_of = self.scan.columns, partial(self.scan.shape, self.machine)
        at = base + self.of_object
        scan_columns.chunk_offset.append(self.offset.rows(scan_columns.shapes, at, shape_of))
        scan_columns.chunk_shape.append(self.shape.rows(scan_columns.shapes, at + self.offset.memo_counts, shape_of))
        scan_columns.chunks += base.size
        return scan_columns.chunks - base.size

"""Contents of a checkpoint of torch.save files: an index of stored tensors, and tensors computed from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import torch

from ...errors import CorruptCheckpoint, error_text
from ...kit import (
    ByteRanges,
    Checkpoint,
    Index,
    ShardColumns,
    StoredFile,
    TensorKind,
    box_column,
    build_index,
    shared_groups,
    stored_columns,
    volumes,
)
from ..archives import StoredTensor
from ._copies import Copy, Stored, same_by_checksum
from ._files import ArchiveFile
from ._masters import Comparison
from ._scattered import ByKey, Scattered, too_large

_STATE = "optimizer.state"


def state_key(state: str, parameter: str | int) -> str:
    """Return the key of a parameter's optimizer state, as `optim` and Megatron-Core name it.

    Examples:
        >>> state_key("exp_avg", "head.weight")
        'optimizer.state.exp_avg.head.weight'
    """
    return f"{_STATE}.{state}.{parameter}"


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a tensor in a file: a box, or a flat range of the whole tensor.

    Attributes:
        key: Key of the tensor.
        file: Number of the file.
        byte: Offset of the part in the file, in bytes.
        offset: Offset of the box; zeros for a flat range.
        shape: Shape of the box; the tensor's for a flat range.
        start: First element of the flat range, -1 for a whole box.
        stop: One past its last element, -1 for a whole box.
        scattered: Description with strides if the elements of the box aren't in row-major order, else None.
    """

    key: str
    file: int
    byte: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int = -1
    stop: int = -1
    scattered: StoredTensor | None = None


def piece_of(key: str, file: int, tensor: StoredTensor, offset: tuple[int, ...] | None = None) -> Piece:
    """Return a stored tensor as a piece of a larger tensor, or as the whole of it.

    Args:
        key: Key of the larger tensor.
        file: Number of the file.
        tensor: Stored tensor.
        offset: Offset of the stored tensor in the larger tensor; None if they are the same.
    """
    start = (0,) * len(tensor.shape) if offset is None else offset
    return Piece(key, file, tensor.begin, start, tensor.shape, scattered=None if tensor.is_row_major else tensor)


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """Contents of a checkpoint, known from its files' pickles and directories.

    Attributes:
        files: Files, in the order of their numbers in the index.
        checked: The same files, with the CRC32s of their records.
        stored: Index of the tensors that have bytes of their own in the files.
        shown: Index of all tensors: stored tensors, and the tensors in `derived` and `numbers`.
        derived: Key of the float32 master weight, by the key of the weight that is computed by rounding it.
        numbers: Tensors without axes, made from Python numbers in the files, by key.
        compared: Master weight and weight to compare before an optimizer state is loaded, by the state's key. If they
            are equal, the state belongs to its parameter.
        refused: Reason that a stored tensor cannot be loaded, by its key.
        copies: Copies of tensors that several files have, by key, unless all are known to be equal. They are compared
            when the tensor is read.
        objects: Sharded objects by unique key, with a `StoredTensor` in place of each tensor.
        common: Common state, with a `StoredTensor` in place of each tensor.
        scattered: Boxes that are not stored in row-major order, by the key of their tensor. The index gives them
            made-up offsets, beyond the end of their file.
        check: Function that is called once before any tensor is read, and raises if a file belongs to another rank;
            None if the format needs no such check.
    """

    files: Sequence[ArchiveFile]
    checked: Sequence[StoredFile]
    stored: Index
    shown: Index
    derived: Mapping[str, str]
    numbers: Mapping[str, torch.Tensor]
    compared: Mapping[str, Comparison]
    refused: Mapping[str, str]
    copies: Mapping[str, Sequence[Copy]]
    objects: Mapping[str, Any]
    common: Any
    scattered: ByKey
    check: Callable[[Checkpoint], None] | None = None


@dataclass(slots=True, eq=False)
class Tensors:
    """The tensors of a checkpoint, collected file by file; `contents_of` turns them into `Contents`.

    Attributes:
        kinds: Dtype and shape of each tensor that the checkpoint lists, by key.
        pieces: Pieces of the stored tensors, in any order, without duplicates.
        derived: Key of the float32 master weight, by the key of the weight that is computed by rounding it.
        numbers: Tensors without axes, made from Python numbers in the files, by key.
        compared: Master weight and weight to compare before an optimizer state is loaded, by the state's key. If they
            are equal, the state belongs to its parameter.
        refused: Reason that a stored tensor cannot be loaded, by its key.
        copies: Copies of each tensor that several files have, by key, equal ones included.
        told: Python number in the first file that has it, and the location of this file, by key.
    """

    kinds: dict[str, TensorKind] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    derived: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, torch.Tensor] = field(default_factory=dict)
    compared: dict[str, Comparison] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    copies: dict[str, list[Copy]] = field(default_factory=dict)
    told: dict[str, tuple[float, str]] = field(default_factory=dict)

    def add(self, key: str, dtype: torch.dtype, shape: Sequence[int], pieces: Iterable[Piece] = ()) -> None:
        """Add a tensor and its stored pieces, none for a tensor that is not stored itself."""
        self.kinds[key] = TensorKind(dtype, tuple(shape), 0)
        self.pieces.extend(pieces)

    def add_number(self, key: str, value: float, where: str) -> None:
        """Add a Python number of a file as a tensor without axes, such as the `step` of torch's optimizers.

        If a number of another file was added under the same key before, this one is added as a copy of that one.
        """
        first = self.told.setdefault(key, (value, where))
        if first[1] != where:
            self.add_copy([key], first[0], value, (first[1], where))
            return
        self.add(key, torch.float32, ())
        try:
            self.numbers[key] = torch.tensor(float(value), dtype=torch.float32, device="cpu")
        except OverflowError:  # an int of more than 1024 bits
            self.refused[key] = "a number that float32 cannot hold"

    def add_derived(self, key: str, dtype: torch.dtype, shape: Sequence[int], master: str) -> None:
        """Add a tensor that is computed by rounding its float32 master weight to a dtype."""
        self.derived[key] = master
        self.add(key, dtype, shape)

    def add_copy(
        self,
        keys: Sequence[str],
        one: Stored,
        other: Stored | None,
        places: tuple[str, str],
        offset: tuple[int, ...] | None = None,
    ) -> None:
        """Add a second file's copy of a value, so that a load compares the two.

        Args:
            keys: Keys of the tensors that have this value.
            one: Value that is loaded: a tensor, or a box of one.
            other: Value in the second file; None if that file has none.
            places: Locations of the two files, for errors.
            offset: Offset of the box in the tensor; None for a whole tensor.
        """
        axes = len(one.shape) if isinstance(one, StoredTensor) else 0
        copy = Copy(one, other, places, (0,) * axes if offset is None else offset, same_by_checksum(one, other))
        for key in keys:
            self.copies.setdefault(key, []).append(copy)


def contents_of(
    files: Sequence[ArchiveFile],
    tensors: Tensors,
    *,
    common: Any,
    objects: Mapping[str, Any] | None = None,
    check: Callable[[Checkpoint], None] | None = None,
    where: Callable[[str], str] = str,
) -> Contents:
    """Return the contents of a checkpoint, after checking that pieces cover their tensors.

    Args:
        files: Files with the tensors' bytes.
        tensors: Tensors that were collected from the files.
        common: Common state, with a `StoredTensor` in place of each tensor.
        objects: Sharded objects by unique key, with a `StoredTensor` in place of each tensor; None if there are none.
        check: Function that raises if ranks' files were exchanged, called once before any tensor is read; or None.
        where: Function from a file's name to its location, for errors.

    Raises:
        CorruptCheckpoint: Elements of a tensor are in no file, or in two.
    """
    kinds, pieces = tensors.kinds, tensors.pieces
    scattered = [(piece.key, piece.scattered) for piece in pieces if piece.scattered is not None]
    tensors.refused.update(too_large(scattered, sum(file.length for file in files)))
    derived, numbers, refused = tensors.derived, tensors.numbers, tensors.refused
    stored = {key: kind for key, kind in kinds.items() if key not in derived and key not in numbers}
    stored_pieces = _behind_ends(files, [piece for piece in pieces if piece.key in stored])
    readable = {key: kind for key, kind in stored.items() if key not in refused}
    _check_tiled(files, readable, [piece for piece in stored_pieces if piece.key in readable], where)
    places: dict[str, list[Piece]] = {}
    for piece in stored_pieces:
        places.setdefault(piece.key, []).append(piece)
    # The rows of derived tensors and numbers are never read: they only complete the index.
    shown = [replace(piece, key=key) for key, master in derived.items() for piece in places.get(master, ())]
    shown += [Piece(key, 0, 0, (), ()) for key in numbers]
    listed = [StoredFile(file.name, file.length) for file in files]
    rows = [(f"{name}", 0, 0, 0) for name in objects or {}]
    return Contents(
        files=files,
        checked=[_with_checksums(file) for file in files],
        stored=_index(stored, stored_pieces, listed, rows),
        shown=_index(kinds, [*stored_pieces, *shown], listed, rows),
        derived=derived,
        numbers=numbers,
        compared=tensors.compared,
        refused=refused,
        copies={key: copies for key, copies in tensors.copies.items() if not all(copy.same for copy in copies)},
        objects=objects or {},
        common=common,
        scattered=_scattered(stored_pieces),
        check=check,
    )


def _behind_ends(files: Sequence[ArchiveFile], pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces, with made-up offsets for those that are not stored in row-major order.

    These offsets are beyond the end of the file, one piece after the other. By such an offset, `in_order` recognises a
    piece in a load plan and removes it from the plan; `read_scattered` reads the removed pieces.
    """
    ends, placed = [file.length for file in files], list[Piece]()
    for piece in pieces:
        if piece.scattered is None:
            placed.append(piece)
        else:
            placed.append(replace(piece, byte=ends[piece.file]))
            ends[piece.file] += prod(piece.shape) * piece.scattered.dtype.itemsize
    return placed


def _scattered(pieces: Sequence[Piece]) -> dict[str, list[Scattered]]:
    by_key: dict[str, list[Scattered]] = {}
    for piece in pieces:
        if piece.scattered is not None:
            by_key.setdefault(piece.key, []).append(Scattered(piece.offset, piece.scattered))
    return by_key


def _with_checksums(file: ArchiveFile) -> StoredFile:
    begin, nbytes, crc32 = (
        np.array([getattr(record, name) for record in file.records], dtype=np.int64)
        for name in ("begin", "nbytes", "crc32")
    )
    return StoredFile(file.name, file.length, ranges=ByteRanges(begin, begin + nbytes, crc32))


def _index(
    kinds: Mapping[str, TensorKind],
    pieces: Sequence[Piece],
    files: Sequence[StoredFile],
    objects: Sequence[tuple[str, int, int, int]],
) -> Index:
    file, byte = (
        np.array([piece.file for piece in pieces], dtype=np.int64),
        np.array([piece.byte for piece in pieces], dtype=np.int64),
    )
    return build_index(piece_columns(kinds, pieces), file, byte, files=files, objects=objects)


def piece_columns(kinds: Mapping[str, TensorKind], pieces: Sequence[Piece]) -> ShardColumns:
    """Return pieces of tensors as shard columns, with one row for each piece and keys sorted by name."""
    number = {key: position for position, key in enumerate(sorted(kinds))}
    axes = max((len(kind.global_shape) for kind in kinds.values()), default=0)
    return stored_columns(
        {key: kinds[key] for key in number},
        np.array([number[piece.key] for piece in pieces], dtype=np.int64),
        box_column([piece.offset for piece in pieces], fill=0, axes=axes),
        box_column([piece.shape for piece in pieces], fill=1, axes=axes),
        np.array([piece.start for piece in pieces], dtype=np.int64),
        np.array([piece.stop for piece in pieces], dtype=np.int64),
    )


def _check_tiled(
    files: Sequence[ArchiveFile], kinds: Mapping[str, TensorKind], pieces: Sequence[Piece], where: Callable[[str], str]
) -> None:
    """Raise unless the pieces of each tensor have as many elements as the tensor, and its boxes do not overlap.

    Overlaps of flat ranges aren't looked for: formats cut flat ranges from one vector.

    Args:
        files: Files of the checkpoint, by number.
        kinds: Dtype and shape of each tensor, by key.
        pieces: Pieces of these tensors.
        where: Function from a file's name to its location, for errors.
    """
    counts = dict.fromkeys(kinds, 0)
    shapes = box_column([piece.shape for piece in pieces], fill=1)
    for piece, volume in zip(pieces, volumes(shapes).tolist(), strict=True):
        counts[piece.key] += piece.stop - piece.start if piece.start >= 0 else volume
    last = {piece.key: where(files[piece.file].name) for piece in pieces}
    wrong = [
        f"{key!r}: {counts[key]} of {prod(kind.global_shape)} elements"
        + (f", some of them in {last[key]!r}" if key in last else "")
        for key, kind in kinds.items()
        if counts[key] != prod(kind.global_shape)
    ]
    wrong += [f"{key!r}: some elements twice, and some not at all" for key in _doubled(pieces)] if not wrong else []
    if wrong:
        heading = "open: the ranks' files do not hold every element of these tensors exactly once"
        fix = "A rank's file is missing, or belongs to another save; copy all files of one save, or load another one."
        raise CorruptCheckpoint(error_text(heading, offenders=wrong, fix=fix))


def _doubled(pieces: Sequence[Piece]) -> list[str]:
    """Return the keys of tensors with overlapping boxes."""
    boxes = [piece for piece in pieces if piece.start < 0]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(piece.key for piece in boxes))}
    offset, shape = ([getattr(piece, name) for piece in boxes] for name in ("offset", "shape"))
    group = np.array([numbers[piece.key] for piece in boxes], dtype=np.int64)
    shared = set(shared_groups(group, box_column(offset, fill=0), box_column(shape, fill=1)).tolist())
    return [key for key, number in numbers.items() if number in shared]

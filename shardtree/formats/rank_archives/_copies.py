"""Copies of a tensor in several ranks' files: equal by their checksums, or else compared when the tensor is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch

from ...kit import Buffer, Checkpoint, Copies, Reader, Resolution, limits, row_major_bits
from ..archives import Box, StoredTensor, box_of, strips
from ._files import filled, opened_at


class Seen:
    """Results of an open checkpoint's comparisons so far.

    Attributes:
        files: True once each file is known to belong to its rank.
        boxes: Boxes in which master weights equal the weights after rounding.
        copies: Message about a compared tensor's copies that differ, by key; "" if all are the same.
    """

    __slots__ = ("boxes", "copies", "files")

    def __init__(self, _: Checkpoint) -> None:
        self.files = False
        self.boxes: set[object] = set()
        self.copies: dict[str, str] = {}


Stored = StoredTensor | float
"""A tensor in a file, or a Python number that stands for one, such as a step."""


class Copy(NamedTuple):
    """The values that two files have for one box of a tensor; they should be equal.

    Attributes:
        one: Value that is loaded.
        other: Value of the other file; None if that file has none.
        places: Locations of the two files, for errors.
        offset: Offset of the box in the tensor.
        same: True if the values are equal, False if not, None if they must be read to know.
    """

    one: Stored
    other: Stored | None
    places: tuple[str, str]
    offset: tuple[int, ...]
    same: bool | None

    @property
    def reason(self) -> str:
        """Message for the error about a tensor whose copies differ."""
        return f"{self.places[1]!r} and {self.places[0]!r} have different copies of it"


AllCopies = Mapping[str, Sequence[Copy]]
"""Copies of each tensor, by its key."""


def same_by_checksum(one: Stored, other: Stored | None) -> bool | None:
    """Return whether two files' values are equal, as far as CRC32s tell; None if tensors must be read to know.

    Tensors of one layout are equal if their records have equal CRC32s. If the CRC32s differ, the tensors differ too,
    provided that each record contains nothing but its tensor.
    """
    if not isinstance(one, StoredTensor) or not isinstance(other, StoredTensor):
        return one == other or (one != one and other != other)  # NaNs count as equal.
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    # Strides along axes of one element mean nothing, and may differ between ranks.
    orders = [tensor.is_row_major or (tensor.stride, tensor.conj, tensor.neg) for tensor in (one, other)]
    if orders[0] != orders[1]:
        return None
    places = [
        (tensor.record.crc32, tensor.record.nbytes, tensor.begin - tensor.record.begin) for tensor in (one, other)
    ]
    if places[0] == places[1] and places[0][0]:
        return True
    # If the tensor fills its record, different CRC32s mean different elements; otherwise other bytes may differ.
    fills = one.is_row_major and all(crc32 and size == _nbytes(one) for crc32, size, _ in places)
    return False if fills else None


def same_elements(checkpoint: Checkpoint, one: StoredTensor, other: StoredTensor) -> bool:
    """Read two stored tensors of one dtype and shape, and return whether their elements are equal bit for bit."""
    if not (one.is_row_major and other.is_row_major):
        boxes = strips(one, f"load: {checkpoint.storage.where(one.file)!r}")
        return all(torch.equal(*(_box_bits(checkpoint, tensor, box) for tensor in (one, other))) for box in boxes)
    nbytes = _nbytes(one)
    with opened_at(checkpoint, one) as first, opened_at(checkpoint, other) as second:
        steps = zip(_steps(first, one.begin, nbytes), _steps(second, other.begin, nbytes), strict=True)
        return all(mine == theirs for mine, theirs in steps)


def _box_bits(checkpoint: Checkpoint, tensor: StoredTensor, box: Box) -> torch.Tensor:
    return row_major_bits(filled(checkpoint, box_of(tensor, box)))


def _steps(reader: Reader, begin: int, nbytes: int) -> Iterator[Buffer]:
    read: Callable[[int, int], Buffer] = reader.read
    end, step = begin + nbytes, limits.STEP_BYTES
    return (read(at, min(at + step, end)) for at in range(begin, end, step))


def _nbytes(tensor: Stored) -> int:
    return tensor.dtype.itemsize * prod(tensor.shape) if isinstance(tensor, StoredTensor) else 0


def _differs(checkpoint: Checkpoint, copy: Copy) -> bool:
    one, other, *_ = copy
    if copy.same is None and isinstance(one, StoredTensor) and isinstance(other, StoredTensor):
        return not same_elements(checkpoint, one, other)
    return not copy.same


def differing_among(checkpoint: Checkpoint, copies: AllCopies, keys: Iterable[str]) -> dict[str, str]:
    """Return messages about the given tensors whose copies differ, by key. Each tensor is compared only once."""
    reasons = checkpoint.once(Seen).copies
    candidates = dict.fromkeys(key for key in keys if key in copies)
    for key in candidates.keys() - reasons.keys():
        reasons[key] = next((copy.reason for copy in copies[key] if _differs(checkpoint, copy)), "")
    return {key: reasons[key] for key in candidates if reasons[key]}


def resolution(checkpoint: Checkpoint, copies: AllCopies, keys: Set[str]) -> Resolution | None:
    """Return a task that compares all copies, with a share for each rank that loads; None if none is needed.

    Args:
        checkpoint: The open checkpoint; with ``verify=None``, no task is needed.
        copies: Copies of tensors, by key.
        keys: Keys that are loaded; if none of them has copies, no task is needed.
    """
    if checkpoint.options.verify is None or keys.isdisjoint(copies):
        return None
    unsure = [(key, copy) for key, key_copies in sorted(copies.items()) for copy in key_copies if not copy.same]
    keep = partial(_keep, checkpoint.once(Seen), [(key, copy.reason) for key, copy in unsure])
    find = partial(_differing, checkpoint, [copy for _, copy in unsure])
    return Resolution(find, keep, partial(_readable, checkpoint, copies))


def _readable(checkpoint: Checkpoint, copies: AllCopies) -> Iterator[Copies]:
    """Yield `Copies` for each box, with the location of each copy's file and a function that reads the copy."""
    for key, key_copies in sorted(copies.items()):
        boxes: dict[tuple[int, ...], list[tuple[str, Callable[[], Any]]]] = {}
        for one, other, places, offset, _ in key_copies:
            readers = boxes.setdefault(offset, [(places[0], partial(_read, checkpoint, one))])
            readers.append((places[1], partial(_read, checkpoint, other)))
        yield from (Copies(key, offset, readers) for offset, readers in boxes.items())


def _read(checkpoint: Checkpoint, value: Stored | None) -> Any:
    result = filled(checkpoint, value)
    return torch.tensor(result, dtype=torch.float64, device="cpu") if isinstance(result, (int, float)) else result


def _differing(checkpoint: Checkpoint, copies: Sequence[Copy], share: int, shares: int) -> list[int]:
    """Compare a share of the copies, and return the positions in `copies` of those that differ.

    Args:
        checkpoint: The open checkpoint.
        copies: All copies, which are divided into shares of about equal bytes.
        share: Number of the share, from 0.
        shares: Number of shares.
    """
    total = sum(_nbytes(copy.one) for copy in copies)
    numbers, before = [], 0
    for number, copy in enumerate(copies):
        # A copy belongs to the share that its middle byte lies in.
        mine = (2 * before + _nbytes(copy.one)) * shares // (2 * total or 1)
        if min(mine, shares - 1) == share and _differs(checkpoint, copy):
            numbers.append(number)
        before += _nbytes(copy.one)
    return numbers


def _keep(memo: Seen, reasons: Sequence[tuple[str, str]], numbers_by_rank: Sequence[Sequence[int]]) -> None:
    differing = sorted((number for numbers in numbers_by_rank for number in numbers), reverse=True)
    memo.copies = dict.fromkeys((key for key, _ in reasons), "") | dict(reasons[number] for number in differing)

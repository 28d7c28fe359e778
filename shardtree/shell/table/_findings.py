"""Findings of `verify`: bytes that aren't what was saved, bytes without a checksum, and how many have one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...core.deferred import notebook_html
from ...core.fingerprints import PartialFingerprint, piece_total, shard_parts
from ...core.geometry import slabs
from ...core.mapping import ShardedTensor
from ...core.plans import grouped
from ...errors import plural, shorten, size_text
from ..storage import in_threads


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a stored tensor.

    Attributes:
        key: the tensor's.
        begin: the first index along each axis of the global tensor.
        end: one past the last.
        flat: where the tensor is stored as flat ranges, the elements of that row-major flattened box, from one up to
            another; None where all of the box is meant.
    """

    key: str
    begin: tuple[int, ...]
    end: tuple[int, ...]
    flat: tuple[int, int] | None = None

    def __str__(self) -> str:
        """Return the region as Python would index it.

        Examples:
            >>> print(Region("w", (0, 4), (2, 8)))
            w[0:2, 4:8]
            >>> print(Region("exp_avg", (0,), (32,), flat=(8, 16)))
            exp_avg[0:32] flattened [8:16]
        """
        sides = ", ".join(f"{begin}:{end}" for begin, end in zip(self.begin, self.end, strict=True))
        box = f"{self.key}[{sides}]" if sides else self.key
        return box if self.flat is None else f"{box} flattened [{self.flat[0]}:{self.flat[1]}]"


@dataclass(frozen=True, slots=True, repr=False)
class Damage:
    """Something in a checkpoint that isn't what was saved.

    Attributes:
        file: the file's name in the checkpoint.
        what: what is wrong, as text.
        begin: first byte of the damaged range of the file.
        end: one past its last byte; 0 if the file is damaged as a whole.
        keys: tensors' keys and objects' unique keys that have bytes there.
        regions: for each chunk of a tensor that has bytes there, the smallest box that holds their elements.
    """

    file: str
    what: str
    begin: int = 0
    end: int = 0
    keys: tuple[str, ...] = ()
    regions: tuple[Region, ...] = ()

    @property
    def holds(self) -> tuple[str, ...]:
        """What lies there, as texts: the regions, then the keys that have none, such as objects.

        Examples:
            >>> Damage("f", "cut", 0, 9, ("w", "rng/shard_0_1"), (Region("w", (0,), (2,)),)).holds
            ('w[0:2]', 'rng/shard_0_1')
        """
        in_regions = {region.key for region in self.regions}
        return (*map(str, self.regions), *(key for key in self.keys if key not in in_regions))

    def __repr__(self) -> str:
        place = f", bytes {self.begin:,} to {self.end:,}" if self.end else ""
        return f"Damage({self.file!r}{place}, {plural(len(self.keys), 'key')})"

    def __str__(self) -> str:
        """Return the damage in one line.

        Examples:
            >>> print(Damage("a/0.bin", "the hash of a block differs", 0, 1024, ("w",), (Region("w", (0,), (2,)),)))
            a/0.bin, bytes 0 to 1,024: the hash of a block differs: w[0:2]
        """
        place = f"{self.file}, bytes {self.begin:,} to {self.end:,}" if self.end else self.file
        return ": ".join(filter(None, (place, self.what, ", ".join(shorten(self.holds)))))


@dataclass(frozen=True, slots=True)
class Unchecked:
    """Bytes of a checkpoint without a checksum: a change in them may go unnoticed.

    Attributes:
        file: the file's name in the checkpoint.
        why: the reason, and what is checked instead, as text.
        nbytes: Number of bytes.
        spans: which they are, as pairs of the first byte and one past the last; () for the whole file.
    """

    file: str
    why: str
    nbytes: int
    spans: tuple[tuple[int, int], ...] = ()

    def covers(self, file: str, byte: int) -> bool:
        """Return whether a byte of a file is one of them.

        Examples:
            >>> Unchecked("f", "no checksum", 2, ((4, 6),)).covers("f", 5)
            True
        """
        return file == self.file and (not self.spans or any(begin <= byte < end for begin, end in self.spans))


@dataclass(frozen=True, slots=True)
class Checked:
    """Bytes of a checkpoint that were compared with a checksum.

    Attributes:
        file: the file's name in the checkpoint.
        nbytes: Number of bytes.
    """

    file: str
    nbytes: int


Finding = Damage | Unchecked | Checked
"""What `verify` may find."""


def is_damaged(findings: Iterable[Finding]) -> bool:
    """Return whether something is damaged.

    Examples:
        >>> is_damaged([Checked("f", 9)]), is_damaged([Damage("f", "cut")])
        (False, True)
    """
    return any(isinstance(one, Damage) for one in findings)


def gaps(length: int, spans: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the ranges of a file that lie in none of the given spans.

    Examples:
        >>> gaps(10, [(4, 6), (1, 4)])
        ((0, 1), (6, 10))
    """
    ranges, at = [], 0
    for begin, end in sorted(spans):
        if begin > at:
            ranges.append((at, begin))
        at = max(at, end)
    return (*ranges, (at, length)) if at < length else tuple(ranges)


def span_findings(file: str, why: str, length: int, spans: Iterable[tuple[int, int]]) -> tuple[Finding, ...]:
    """Return the number of checked bytes of a file as a `Checked`, and of the others as an `Unchecked`.

    Args:
        file: the file's name.
        why: the reason that other bytes have no checksum.
        length: Length of the file, in bytes.
        spans: ranges of bytes that were compared with a checksum.

    Examples:
        >>> span_findings("f", "no checksum", 10, [(0, 7)])
        (Checked(file='f', nbytes=7), Unchecked(file='f', why='no checksum', nbytes=3, spans=((7, 10),)))
    """
    ranges = gaps(length, spans)
    nbytes = sum(end - begin for begin, end in ranges)
    unchecked = (Unchecked(file, why, nbytes, ranges if nbytes < length else ()),) if ranges else ()
    return (Checked(file, length - nbytes), *unchecked) if nbytes < length else unchecked


def untaken_findings(untaken: Mapping[str, str]) -> list[Unchecked]:
    """Return what a reader of a format doesn't take, so that it is named where all else is checked.

    Args:
        untaken: why it isn't taken, by key or name.

    Examples:
        >>> untaken_findings({"text": "torch has no such dtype"})
        [Unchecked(file='text', why="'text' isn't taken: torch has no such dtype", nbytes=0, spans=())]
    """
    return [Unchecked(name, f"{name!r} isn't taken: {why}", 0) for name, why in sorted(untaken.items())]


def refused_findings(refused: Mapping[str, str]) -> list[Unchecked]:
    """Return the finding of values that are as they were saved, and that a load with the same options refuses.

    Args:
        refused: The error's text by the value's name.

    Examples:
        >>> refused_findings({"rng/shard_0_1": "it names http.HTTPStatus, which isn't known to be harmless"})[0].nbytes
        0
    """
    if not refused:
        return []
    name, error = min(refused.items())
    cause = error.partition("\n")[0]
    return [Unchecked(name, f"a load with these options refuses {plural(len(refused), 'value')}: {cause}", 0)]


def by_reason(findings: Iterable[Unchecked]) -> dict[str, list[Unchecked]]:
    """Return what couldn't be checked, by why.

    Examples:
        >>> list(by_reason([Unchecked("a", "no checksum", 7), Unchecked("b", "no checksum", 9)]))
        ['no checksum']
    """
    groups: dict[str, list[Unchecked]] = {}
    for one in findings:
        groups.setdefault(one.why, []).append(one)
    return groups


@dataclass(frozen=True, slots=True, repr=False)
class VerifyReport:
    """The verdict of a `verify`: how much it has read, and what it found, or couldn't check.

    Attributes:
        bytes_read: of all files; those with two kinds of checksums are read twice.
        unchecked: bytes without a checksum.
        bytes_checked: bytes that were compared with a checksum, each counted once.
        damage: what isn't what was saved.
    """

    bytes_read: int
    unchecked: tuple[Unchecked, ...]
    bytes_checked: int = 0
    damage: tuple[Damage, ...] = ()

    @property
    def sound(self) -> bool | None:
        """Whether all is as it was saved; None where nothing is damaged, and some bytes have no checksum.

        Examples:
            >>> unchecked = (Unchecked("f", "no checksum", 7),)
            >>> VerifyReport(100, (), 100).sound, VerifyReport(100, unchecked, 93).sound
            (True, None)
            >>> VerifyReport(100, unchecked, 93, (Damage("f", "cut"),)).sound
            False
        """
        if self.damage:
            return False
        return None if self.unchecked_nbytes else True

    def __str__(self) -> str:
        """Return the amounts of bytes read, checked and, by reason, unchecked.

        Examples:
            >>> print(VerifyReport(100, (Unchecked("f", "no checksum", 7),), 93))
            100 B read, 93 B of the files checked
            7 B in 1 file couldn't be checked: no checksum
        """
        lines = [f"{size_text(self.bytes_read)} read, {size_text(self.bytes_checked)} of the files checked"]
        lines += [f"damaged: {one}" for one in shorten(list(map(str, self.damage)))]
        for why, group in by_reason(self.unchecked).items():
            amount = size_text(sum(one.nbytes for one in group))
            lines.append(f"{amount} in {plural(len(group), 'file')} couldn't be checked: {why}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        checked, unchecked = size_text(self.bytes_checked), size_text(self.unchecked_nbytes)
        return f"VerifyReport(sound={self.sound}, {checked} checked, {unchecked} unchecked)"

    def _repr_html_(self) -> str:
        return notebook_html(self)

    @property
    def unchecked_nbytes(self) -> int:
        """How many bytes have no checksum.

        Examples:
            >>> VerifyReport(100, (Unchecked("f", "no checksum", 7),)).unchecked_nbytes
            7
        """
        return sum(one.nbytes for one in self.unchecked)


# Fingerprints of stored tensors, which are read back slab by slab through their format's LOAD_SHARDED

_GROUP_BYTES = 32 * 1024 * 1024  # about the most that is in memory at a time
_SLAB_BYTES = _GROUP_BYTES // 2

Load = Callable[[Sequence[ShardedTensor]], object]
"""Fills the shards' data in place, as LOAD_SHARDED does."""


def stored_parts(
    tensors: Iterable[ShardedTensor], load: Load, *, rank: int = 0, ranks: int = 1, threads: int | None = None
) -> Iterator[dict[str, PartialFingerprint]]:
    """Yield shares of stored tensors' fingerprints, a group of slabs at a time.

    Args:
        tensors: whole ones, without data.
        load: reads them.
        rank: which share of the groups to read.
        ranks: how many shares there are.
        threads: how many compute at a time; None for the usual number.
    """
    for number, group in enumerate(_groups(tensors)):
        if number % ranks == rank:
            slabs = [slab.init_data("cpu") for slab in group]
            load(slabs)
            yield shard_parts(slabs, lambda pieces: in_threads(piece_total, pieces, threads))


def _groups(tensors: Iterable[ShardedTensor]) -> Iterator[list[ShardedTensor]]:
    """Return slabs in groups that fit in memory."""
    # Groups, since planning a read takes longer than reading a small tensor.
    slabs = (slab for tensor in tensors for slab in _slabs(tensor))
    return grouped(slabs, lambda slab: torch.Size(slab.local_shape).numel() * slab.dtype.itemsize, _GROUP_BYTES)


def _slabs(tensor: ShardedTensor) -> Iterator[ShardedTensor]:
    shape = tensor.global_shape
    if not torch.Size(shape).numel():
        yield ShardedTensor(tensor.key, None, tensor.dtype, shape, shape, (0,) * len(shape), None)
    for offset, size in slabs(shape, max(1, _SLAB_BYTES // tensor.dtype.itemsize)):
        yield ShardedTensor(tensor.key, None, tensor.dtype, size, shape, offset, None)

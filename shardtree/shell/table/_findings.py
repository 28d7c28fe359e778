"""Findings of `verify`: damaged bytes, bytes without a checksum, and the number of checked bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from ...core.deferred import notebook_html
from ...errors import plural, shorten, size_text


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a stored tensor, or a flat range of a box's elements.

    Attributes:
        key: Key of the tensor.
        begin: First index along each axis of the global tensor.
        end: One past the last index along each axis.
        flat: Range of elements of the row-major flattened box, for tensors that are stored as flat ranges; None for
            the whole box.
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
    """A damaged range of a checkpoint's file.

    Attributes:
        file: Name of the file in the checkpoint.
        what: Description of the damage.
        begin: First byte of the damaged range.
        end: One past the last byte of the range; 0 if the file is damaged as a whole.
        keys: Keys of tensors and unique keys of objects with bytes in the range.
        regions: Smallest boxes around the affected elements, one for each chunk with bytes in the range.
    """

    fix: ClassVar[str] = ""

    file: str
    what: str
    begin: int = 0
    end: int = 0
    keys: tuple[str, ...] = ()
    regions: tuple[Region, ...] = ()

    @property
    def key(self) -> str:
        """The file's name."""
        return self.file

    @property
    def where(self) -> str:
        """The byte range as text; empty if the file is damaged as a whole."""
        return f"bytes {self.begin:,} to {self.end:,}" if self.end else ""

    @property
    def holds(self) -> tuple[str, ...]:
        """The texts of `regions`, such as ``w[0:2]``, followed by those `keys` that have no region.

        Examples:
            >>> Damage("f", "cut", 0, 9, ("w", "rng/shard_0_1"), (Region("w", (0,), (2,)),)).holds
            ('w[0:2]', 'rng/shard_0_1')
        """
        in_regions = {region.key for region in self.regions}
        return (*map(str, self.regions), *(key for key in self.keys if key not in in_regions))

    def __repr__(self) -> str:
        place = ", ".join(filter(None, (repr(self.file), self.where)))
        return f"Damage({place}, {plural(len(self.keys), 'key')})"

    def __str__(self) -> str:
        """Return the damage in one line.

        Examples:
            >>> print(Damage("a/0.bin", "the hash of a block differs", 0, 1024, ("w",), (Region("w", (0,), (2,)),)))
            a/0.bin, bytes 0 to 1,024: the hash of a block differs: w[0:2]
        """
        place = ", ".join(filter(None, (self.file, self.where)))
        return ": ".join(filter(None, (place, self.what, ", ".join(shorten(self.holds)))))


@dataclass(frozen=True, slots=True)
class Unchecked:
    """Bytes of a checkpoint without a checksum, so that damage may go unnoticed.

    Attributes:
        file: Name of the file in the checkpoint.
        why: Reason why there is no checksum, and what is checked instead.
        nbytes: Number of bytes.
        spans: (first byte, one past the last byte) of each unchecked range; () for the whole file.
    """

    file: str
    why: str
    nbytes: int
    spans: tuple[tuple[int, int], ...] = ()

    def covers(self, file: str, byte: int) -> bool:
        """Return whether a byte of a file is among the unchecked ones.

        Examples:
            >>> Unchecked("f", "no checksum", 2, ((4, 6),)).covers("f", 5)
            True
        """
        return file == self.file and (not self.spans or any(begin <= byte < end for begin, end in self.spans))


@dataclass(frozen=True, slots=True)
class Checked:
    """Bytes of a checkpoint that were compared with a checksum.

    Attributes:
        file: Name of the file in the checkpoint.
        nbytes: Number of bytes.
    """

    file: str
    nbytes: int


Finding = Damage | Unchecked | Checked
"""A finding of `verify`."""


def is_damaged(findings: Iterable[Finding]) -> bool:
    """Return whether any finding is damage.

    Examples:
        >>> is_damaged([Checked("f", 9)]), is_damaged([Damage("f", "cut")])
        (False, True)
    """
    return any(isinstance(one, Damage) for one in findings)


def by_reason(findings: Iterable[Unchecked]) -> dict[str, list[Unchecked]]:
    """Return unchecked bytes grouped by their reasons.

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
    """Result of a `verify`: numbers of bytes read and checked, the damage, and the bytes that couldn't be checked.

    Attributes:
        bytes_read: Number of bytes read; files with two kinds of checksums are read twice.
        unchecked: Ranges of bytes without a checksum, by file and reason.
        bytes_checked: Number of bytes that were compared with a checksum, each counted once.
        damage: Damaged ranges of files.
    """

    bytes_read: int
    unchecked: tuple[Unchecked, ...]
    bytes_checked: int = 0
    damage: tuple[Damage, ...] = ()

    @property
    def sound(self) -> bool | None:
        """Whether the checkpoint is undamaged; None if no damage was found, but some bytes have no checksum.

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
            7 B in 1 file could not be checked: no checksum
        """
        lines = [f"{size_text(self.bytes_read)} read, {size_text(self.bytes_checked)} of the files checked"]
        lines += [f"damaged: {text}" for text in shorten(list(map(str, self.damage)))]
        for why, group in by_reason(self.unchecked).items():
            amount = size_text(sum(unchecked.nbytes for unchecked in group))
            lines.append(f"{amount} in {plural(len(group), 'file')} could not be checked: {why}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        checked, unchecked = size_text(self.bytes_checked), size_text(self.unchecked_nbytes)
        return f"VerifyReport(sound={self.sound}, {checked} checked, {unchecked} unchecked)"

    def _repr_html_(self) -> str:
        return notebook_html(self)

    @property
    def unchecked_nbytes(self) -> int:
        """Number of bytes without a checksum.

        Examples:
            >>> VerifyReport(100, (Unchecked("f", "no checksum", 7),)).unchecked_nbytes
            7
        """
        return sum(one.nbytes for one in self.unchecked)

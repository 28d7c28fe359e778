"""Findings of `verify`: bytes that aren't what was saved, bytes without a checksum, and how many have one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from ...core.deferred import notebook_html
from ...errors import plural, shorten, size_text


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
        """The range of bytes; empty if the file is damaged as a whole."""
        return f"bytes {self.begin:,} to {self.end:,}" if self.end else ""

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

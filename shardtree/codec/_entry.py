"""One tensor of a safetensors file, and how many bytes it must have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

MAX_INT = 2**63 - 1

# Readers of the format know these; what they mean as a torch dtype is `dtype_from_tag`'s business.
_TAGS_BY_BITS = {
    4: ("F4",),
    6: ("F6_E2M3", "F6_E3M2"),
    8: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
    16: ("U16", "I16", "F16", "BF16"),
    32: ("U32", "I32", "F32"),
    64: ("U64", "I64", "F64", "C64"),
}
_BITS = {tag: bits for bits, tags in _TAGS_BY_BITS.items() for tag in tags}


class Entry(NamedTuple):
    """One tensor of a safetensors file.

    Attributes:
        name: its name in the file.
        tag: its dtype, in the format's words: `"BF16"`.
        shape: its lengths, in elements.
        start: its first byte, counted from where the data starts.
        stop: the byte after its last.
    """

    name: str
    tag: str
    shape: tuple[int, ...]
    start: int
    stop: int


def byte_length(tag: str, shape: Iterable[int]) -> int:
    """Return the number of bytes that a tag and a shape make, either of which may come from a file.

    Raises:
        ValueError: no such tag, more elements than 64 bits count, or a last byte that is half used.

    Examples:
        >>> byte_length("BF16", (2, 3)), byte_length("F64", ()), byte_length("F4", (2, 0))
        (12, 8, 0)
    """
    if tag not in _BITS:
        raise ValueError(f"unknown dtype {tag[:100]!r}")
    length, rest = divmod(element_count(shape) * _BITS[tag], 8)
    if rest:
        raise ValueError(f"the last byte of dtype {tag} is used in part")
    return length


def element_count(shape: Iterable[int]) -> int:
    """Return the number of elements of a shape, which may come from a file.

    Raises:
        ValueError: a negative length, or more elements than 64 bits count, also where another length is zero.

    Examples:
        >>> element_count((2, 3)), element_count((2, 0)), element_count(())
        (6, 0, 1)
    """
    count, is_empty = 1, False
    for length in shape:
        count *= length or 1
        is_empty |= length == 0
        if not 0 < count <= MAX_INT:  # stop here: the whole product of a hostile shape would itself be large
            raise ValueError("a shape with a negative length, or more elements than 64 bits count")
    return 0 if is_empty else count

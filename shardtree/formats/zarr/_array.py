"""A stored array: its shape, its grid of chunk files, and the names of these files."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ...errors import CorruptCheckpoint, UnsupportedValue, error_text
from ...kit import dtype_from_name, dtype_name, row_major_bits

_MOST_AXES = 64  # This is NumPy's limit.
_SUMMABLE_BYTES = 2**58  # Sums of offsets and sizes below this bound fit int64.

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array, as its metadata describes it.

    Attributes:
        name: Folder of the array in the checkpoint.
        key: Key of the tensor.
        dtype: Dtype of the tensor.
        shape: Shape of the tensor.
        chunk: Shape of a file's box. Files at an edge have the same length: elements beyond the tensor are padding.
        inner: Shape of the chunks inside a file; None if a file is one chunk.
        prefix: Prefix of the names of chunk files: "c" in zarr v3, empty in v2.
        separator: Separator of the numbers in a chunk file's name.
        fill: Value of elements that aren't stored, as JSON; None if there is none.
        raw: True if files are plain row-major bytes.
        index_first: True if a file with inner chunks begins with their index, False if it ends with it.
        index_checked: True if the index is followed by its CRC.
        document: Metadata, as a JSON object.
    """

    name: str
    key: str
    dtype: torch.dtype
    shape: Shape
    chunk: Shape
    inner: Shape | None = None
    prefix: str = "c"
    separator: str = "."
    fill: Any = None
    raw: bool = True
    index_first: bool = False
    index_checked: bool = True
    document: Any = None

    @property
    def without_fill(self) -> str:
        """Text of the error for a chunk that isn't stored; empty if the array has a fill value."""
        if self.fill is not None:
            return ""
        how = "null" if isinstance(self.document, dict) and "fill_value" in self.document else "missing"
        return f"a chunk is not stored, and the array's fill_value is {how}"

    @property
    def counts(self) -> Shape:
        """Number of files along each axis; (1,) for a scalar."""
        return tuple(-(-size // step) for size, step in zip(self.box, self.step, strict=True))

    @property
    def box(self) -> Shape:
        """Shape of the array; (1,) for a scalar."""
        return self.shape or (1,)

    @property
    def step(self) -> Shape:
        """Shape of the box in a file; (1,) for a scalar."""
        return self.chunk or (1,)

    @property
    def file_bytes(self) -> int:
        """Number of bytes of a file's elements, including those beyond an edge."""
        return prod(self.chunk) * self.dtype.itemsize

    def file_name(self, cell: Shape) -> str:
        """Return the name of the file of a cell of the grid.

        Examples:
            >>> StoredArray("w", "w", torch.float32, (4, 6), (2, 3)).file_name((0, 1))
            'w/c.0.1'
        """
        numbers = [str(number) for number in (cell if self.shape else ())]
        # The only file of a scalar is named 0 in zarr v2, and c in v3.
        prefix = [self.prefix] if self.prefix else []
        return f"{self.name}/{self.separator.join([*prefix, *numbers]) or '0'}"


def checked_shapes(shapes: Iterator[Any] | tuple[Any, ...], item_size: int, what: str) -> list[Shape]:
    """Return the shapes of an array and its chunks as tuples, after checking that they have the same number of axes.

    Raises:
        CorruptCheckpoint: A shape isn't a list of numbers or is out of range, or a chunk has no elements.

    Examples:
        >>> checked_shapes(([4, 6], [2, 3]), 4, "w")
        [(4, 6), (2, 3)]
    """
    # The check comes before any arithmetic: sizes come from a file, and their product must fit 64 bits.
    tuples: list[Shape] = []
    for number, shape in enumerate(shapes):
        least = 1 if number else 0
        # type() is compared, since isinstance accepts bool as int, and JSON's true is no size.
        sound = isinstance(shape, list) and len(shape) <= _MOST_AXES
        if not (sound and all(type(size) is int and least <= size <= _SUMMABLE_BYTES for size in shape)):
            raise unsound_array(what, f"shape {shape!r}"[:200], f"at most {_MOST_AXES} sizes of {least} or more")
        if prod(max(size, 1) for size in shape) * item_size > _SUMMABLE_BYTES:
            raise unsound_array(what, f"shape {shape!r}"[:200], "fewer elements")
        if tuples and len(shape) != len(tuples[0]):
            raise unsound_array(what, f"chunks of {len(shape)} axes", f"{len(tuples[0])} axes, like the array")
        tuples.append(tuple(shape))
    return tuples


def unsound_array(what: str, found: str, expected: str) -> CorruptCheckpoint:
    """Return the error for metadata that doesn't describe an array.

    Examples:
        >>> print(unsound_array("the array 'w'", "shape 7", "a list"))
        open: the array 'w' has invalid zarr metadata
          found shape 7, expected a list
          The file was damaged or made by another program; load another checkpoint.
    """
    fix = "The file was damaged or made by another program; load another checkpoint."
    return CorruptCheckpoint(
        error_text(f"open: {what} has invalid zarr metadata", found=found, expected=expected, fix=fix)
    )


# This section maps names of dtypes: zarr's own, and unsigned integers for the bits of dtypes that zarr lacks.

_V3 = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
}
_EXTENSIONS = {"bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"}
"""Names that other writers use for dtypes that zarr's core lacks."""

_V2_KINDS = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}
_V2 = re.compile(r"([<>|=])([biufc])(\d{1,2})")
_V2_FOREIGN = re.compile(r"\|O|[<>|=][SUV]\d{1,9}|[<>=][mM]8(\[\w{1,20}\])?|[<>=](f12|f16|c24|c32)")
"""Objects, strings, raw bytes, dates, and numbers of more than 64 bits, which NumPy has and torch lacks."""
_V3_FAMILY = re.compile(r"(bool|u?int|float|complex)\d*")
_V3_FOREIGN = {"int2", "int4", "uint2", "uint4"}
_PLAIN_BITS = {"<V2", "|V2", "bfloat16"}


def zarr_name(dtype: torch.dtype) -> str:
    """Return the zarr v3 data type that stores a dtype; an unsigned integer for dtypes that zarr lacks.

    Examples:
        >>> zarr_name(torch.float32), zarr_name(torch.bfloat16), zarr_name(torch.float8_e4m3fn)
        ('float32', 'uint16', 'uint8')
    """
    name = dtype_name(dtype)
    return name if name in _V3 else f"uint{dtype.itemsize * 8}"


def dtype_of_v3(name: Any, what: str) -> torch.dtype | None:
    """Return the dtype of a zarr v3 data type; None if torch has none.

    Raises:
        CorruptCheckpoint: The name isn't a data type.

    Examples:
        >>> dtype_of_v3("int16", "'w'"), dtype_of_v3("bfloat16", "'w'"), dtype_of_v3({"name": "struct"}, "'w'")
        (torch.int16, torch.bfloat16, None)
    """
    if isinstance(name, str) and (name in _V3 or name in _EXTENSIONS):
        return _dtype_if_known(name)
    type_name = name.get("name") if isinstance(name, dict) else name
    # Other names may be extensions of other programs; only names of zarr's own families are known to be wrong.
    if (
        not isinstance(type_name, str)
        or not type_name
        or (_V3_FAMILY.fullmatch(type_name) and type_name not in _V3_FOREIGN)
    ):
        raise unsound_array(what, f"data_type {name!r}"[:200], "a data type of zarr")
    return None


def dtype_of_v2(text: Any, what: str) -> tuple[torch.dtype | None, bool]:
    """Return the dtype of a zarr v2 array (None if torch lacks it), and whether the array's items are little-endian.

    Two raw bytes count as a bfloat16. Megatron-Core creates an array of raw bytes, and later writes bfloat16 into its
    metadata; an interrupted save leaves the raw bytes there.

    Raises:
        CorruptCheckpoint: The text isn't a dtype.

    Examples:
        >>> [dtype_of_v2(text, "'w'") for text in ("<f4", ">i2", "bfloat16", "<M8[ns]")]
        [(torch.float32, True), (torch.int16, False), (torch.bfloat16, True), (None, True)]
    """
    if isinstance(text, list) and text:
        return None, True  # The items are records of named fields.
    # A save of Megatron-Core that was interrupted leaves raw bytes in the metadata, where it later writes bfloat16.
    if isinstance(text, str) and text in _PLAIN_BITS:
        return torch.bfloat16, True
    if isinstance(text, str) and _V2_FOREIGN.fullmatch(text):
        return None, True
    parts = _V2.fullmatch(text) if isinstance(text, str) else None
    order, kind, size = parts.groups() if parts else ("", "b", "0")
    name = "bool" if kind == "b" and size == "1" else f"{_V2_KINDS[kind]}{int(size) * 8}"
    if name not in _V3:
        raise unsound_array(what, f"dtype {text!r}"[:200], "a dtype of NumPy, such as '<f4'")
    return _dtype_if_known(name), order != ">"


def _dtype_if_known(name: str) -> torch.dtype | None:
    try:
        return dtype_from_name(name)
    except UnsupportedValue:  # This torch is older than the dtype.
        return None


def fill_item(value: Any, dtype: torch.dtype, what: str) -> bytes:
    r"""Return the bytes of one element that has the fill value.

    Args:
        value: Fill value in zarr's metadata, not None.
        dtype: Dtype of the items.
        what: Name of the array, for errors.

    Raises:
        CorruptCheckpoint: The dtype doesn't have this value.

    Examples:
        >>> [fill_item(value, torch.bfloat16, "'w'") for value in (1, "0x7fc0", "-Infinity")]
        [b'\x80?', b'\xc0\x7f', b'\x80\xff']
    """
    try:
        # By zarr's spec, the bits of a NaN are hexadecimal text, complex values are pairs, infinities are words.
        if isinstance(value, str) and value.startswith("0x"):
            return int(value, 16).to_bytes(dtype.itemsize, "little")
        if isinstance(value, list):
            real, imaginary = map(float, value)
            number = torch.tensor([complex(real, imaginary)], dtype=torch.complex128, device="cpu")
        elif dtype.is_floating_point:
            number = torch.tensor([float(value)], dtype=torch.float64, device="cpu")
        else:
            value = float(value) if isinstance(value, str) else value
            number = torch.tensor([value], dtype=dtype, device="cpu")
        return row_major_bits(number.to(dtype)).numpy().tobytes()
    except (ValueError, TypeError, OverflowError, RuntimeError, struct.error) as error:
        found, expected = f"fill value {value!r}"[:200], f"a {dtype_name(dtype)}"
        raise unsound_array(what, found, expected) from error

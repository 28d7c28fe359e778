"""Headers of safetensors files, and JSON: canonical when it is written, checked strictly when it is read.

A header is 8 bytes with the length of the rest, JSON that lists the tensors and their byte ranges, and padding spaces.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from json.encoder import encode_basestring
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn

from ...errors import CorruptCheckpoint, MetadataError, UnsupportedValue, error_text

_ZERO = re.compile(b"\0")


def canonical_json(value: Any) -> bytes:
    """Return the canonical JSON text of a value: sorted keys, no spaces, ASCII.

    Args:
        value: Nested lists, tuples and dicts with string keys, of None, bools, ints, finite floats and strings.

    Raises:
        UnsupportedValue: The value contains anything else.

    Examples:
        >>> canonical_json({"b": [1, 2.5], "a": None})
        b'{"a":null,"b":[1,2.5]}'
    """
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedValue(error_text(f"the value cannot be written as JSON: {error}")) from error


def parse_json(data: bytes | bytearray | memoryview, what: str) -> Any:
    """Parse an untrusted JSON text.

    Args:
        data: The text in UTF-8.
        what: Name of the text, for messages.

    Raises:
        CorruptCheckpoint: The text isn't UTF-8 or JSON, has a name twice in one object or a number that isn't finite,
            or is nested too deep.

    Examples:
        >>> parse_json(b'{"a": [1, 2.5]}', "metadata.json")
        {'a': [1, 2.5]}
    """
    try:
        # This comes before the decoding: a file with holes can be terabytes long, takes no space, and reads as zeros.
        if _ZERO.search(data):
            raise ValueError("a zero byte")
        text = str(data, "utf-8")
        return json.loads(
            text, object_pairs_hook=_unique_pairs, parse_constant=_refuse_constant, parse_float=_finite_float
        )
    except RecursionError:
        raise CorruptCheckpoint(error_text(f"{what}: JSON is nested too deep")) from None
    except ValueError as error:
        raise CorruptCheckpoint(error_text(f"{what}: not valid JSON: {str(error)[:200]}")) from error


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # json keeps the last of two members with one name, other readers the first: they would see different checkpoints.
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return fields


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:50]} is out of range")
    return value


# Entries, and the size of their data.

MAX_INT = 2**63 - 1

# All tags of the format, including those without a dtype in torch: a file with such a tensor is still valid.
_TAGS_BY_BITS = {
    4: ("F4",),
    6: ("F6_E2M3", "F6_E3M2"),
    8: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
    16: ("U16", "I16", "F16", "BF16"),
    32: ("U32", "I32", "F32"),
    64: ("U64", "I64", "F64", "C64"),
}
_BITS = {tag: bits for bits, tags in _TAGS_BY_BITS.items() for tag in tags}


class HeaderEntry(NamedTuple):
    """One tensor of a safetensors file.

    Attributes:
        name: Name of the tensor in the file.
        tag: Dtype as the format names it, such as `"BF16"`.
        shape: Shape in elements.
        start: Offset of its first byte in the data.
        stop: Offset after its last byte in the data.
    """

    name: str
    tag: str
    shape: tuple[int, ...]
    start: int
    stop: int


def byte_length(tag: str, shape: Iterable[int]) -> int:
    """Return the size in bytes of a tensor with this dtype tag and shape, which may come from an untrusted file.

    Raises:
        ValueError: The tag is unknown, `element_count` refuses the shape, or the elements don't fill whole bytes.

    Examples:
        >>> byte_length("BF16", (2, 3)), byte_length("F64", ()), byte_length("F4", (2, 0))
        (12, 8, 0)
    """
    if tag not in _BITS:
        raise ValueError(f"unknown dtype {tag[:100]!r}")
    length, rest = divmod(element_count(shape) * _BITS[tag], 8)
    if rest:
        raise ValueError(f"the elements of dtype {tag} do not fill whole bytes")
    return length


def element_count(shape: Iterable[int]) -> int:
    """Return the number of elements of a shape, which may come from an untrusted file.

    Raises:
        ValueError: A length is negative, or the product of the lengths other than zero exceeds 2**63 - 1.

    Examples:
        >>> element_count((2, 3)), element_count((2, 0)), element_count(())
        (6, 0, 1)
    """
    count, is_empty = 1, False
    for length in shape:
        count *= length or 1
        is_empty |= length == 0
        if not 0 < count <= MAX_INT:  # inside the loop: the whole product of a hostile shape could fill the memory
            raise ValueError("the shape has a negative length, or more elements than 64 bits can count")
    return 0 if is_empty else count


_LENGTH_BYTES = 8
_MAX_HEADER = 100_000_000  # bytes; the safetensors package refuses more
_METADATA = "__metadata__"


def encode_header(
    entries: Iterable[HeaderEntry], metadata: Mapping[str, str] | None = None, *, alignment: int = 64
) -> bytes:
    """Return the header of a safetensors file: all bytes before the tensors' data.

    Args:
        entries: Entries in the order of their bytes, without gaps.
        metadata: Strings that are stored beside the tensors.
        alignment: Number of bytes; the data starts at a multiple of it.

    Returns:
        An 8-byte little-endian length, JSON in UTF-8, and spaces up to the alignment.

    Raises:
        MetadataError: An entry is invalid, the entries leave gaps or overlap, a name occurs twice, or the header would
            exceed 100 MB.

    Examples:
        >>> header = encode_header([HeaderEntry("w", "F32", (2, 3), 0, 24)])
        >>> len(header), header[8:65]
        (128, b'{"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}')
    """
    # The text is put together by hand, which is faster than json.dumps: a checkpoint has an entry for each tensor.
    parts = _entry_texts(list(entries))
    if metadata:
        pairs = (f"{encode_basestring(name)}:{encode_basestring(text)}" for name, text in metadata.items())
        parts.insert(0, f'"{_METADATA}":{{{",".join(pairs)}}}')
    header = "{" + ",".join(parts) + "}"
    try:
        text = header.encode("utf-8")
    except UnicodeEncodeError as error:
        near = header[max(0, error.start - 40) : error.start + 40]
        fault = f"safetensors header: a name is not valid Unicode, near {near!r}"
        raise MetadataError(error_text(fault, fix="Use names without lone surrogates.")) from None
    text += b" " * (-(_LENGTH_BYTES + len(text)) % alignment)
    if len(text) > _MAX_HEADER:
        fault = "safetensors header: too large"
        expected = f"at most {_MAX_HEADER} bytes"
        raise MetadataError(error_text(fault, found=len(text), expected=expected, fix="Store fewer tensors in a file."))
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _entry_texts(entries: list[HeaderEntry]) -> list[str]:
    """Return each entry as the text of a member of the header's JSON object, such as ``"w":{...}``.

    Raises:
        MetadataError: An entry is invalid, the entries leave gaps or overlap, or a name occurs twice.
    """
    if len({_METADATA, *(entry.name for entry in entries)}) != len(entries) + 1:
        heading = f"safetensors header: two entries have the same name, or one is named {_METADATA!r}"
        raise MetadataError(error_text(heading, fix=f"Give each tensor a unique name other than {_METADATA!r}."))
    kinds: dict[tuple[str, tuple[int, ...]], tuple[int, str]] = {}  # models repeat few shapes in many layers
    texts, end = [], 0
    for entry in entries:
        kind = (entry.tag, entry.shape)
        if kind not in kinds:
            kinds[kind] = _kind(entry)
        length, text = kinds[kind]
        if entry.start != end or entry.stop != end + length:
            raise MetadataError(_tiling_problem(entry, end, length))
        end = entry.stop
        texts.append(f'{encode_basestring(entry.name)}:{text}"data_offsets":[{entry.start},{end}]}}')
    return texts


def _kind(entry: HeaderEntry) -> tuple[int, str]:
    try:
        length = byte_length(entry.tag, entry.shape)
    except ValueError as error:
        raise MetadataError(error_text(f"safetensors header: entry {_short(entry.name)}: {error}")) from None
    shape = ",".join(map(str, entry.shape))
    return length, f'{{"dtype":"{entry.tag}","shape":[{shape}],'


def _tiling_problem(entry: HeaderEntry, end: int, length: int) -> str:
    problem = "leaves a gap, overlaps the entry before, or is not as long as its shape requires"
    heading = f"safetensors header: entry {_short(entry.name)} {problem}"
    return error_text(heading, found=f"bytes {entry.start} to {entry.stop}", expected=f"bytes {end} to {end + length}")


def _short(name: str) -> str:
    return repr(name if len(name) <= 100 else name[:100] + "…")


def header_length(data: bytes | bytearray | memoryview, file_length: int) -> int:
    """Return the length of a safetensors header's JSON with its padding, from the first 8 bytes of the file.

    Args:
        data: Beginning of the file, at least 8 bytes.
        file_length: Length of the whole file, in bytes.

    Raises:
        CorruptCheckpoint: No file of this length can have such a header.

    Examples:
        >>> header_length(encode_header([]), 64)
        56
    """
    if (size := min(len(data), file_length)) < _LENGTH_BYTES:
        heading = "safetensors header: the file is too short"
        raise CorruptCheckpoint(error_text(heading, found=f"{size} bytes", expected="8 or more"))
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    # The check comes before the header is read: the number is from the file, and could claim 2**63 bytes.
    limit = min(file_length - _LENGTH_BYTES, _MAX_HEADER)
    if not 2 <= length <= limit:
        heading = "safetensors header: the declared length of the header does not fit the file"
        raise CorruptCheckpoint(error_text(heading, found=f"{length} bytes", expected=f"2 to {limit}"))
    return length


def header_of(
    read: Callable[[int, int], bytes | bytearray | memoryview], length: int, first_bytes: int = _LENGTH_BYTES
) -> tuple[tuple[HeaderEntry, ...], int, dict[str, str]]:
    """Return the tensors of a safetensors file, the offset of its data, and its metadata; only the header is read.

    Args:
        read: Function from a byte range of the file to its bytes; called twice at most.
        length: Length of the file, in bytes.
        first_bytes: Number of bytes to read first; a header that lies within them takes no second call.

    Raises:
        CorruptCheckpoint: The header is invalid, as for `decode_header`.

    Examples:
        >>> file = encode_header([], {"format": "pt"})
        >>> header_of(lambda begin, end: file[begin:end], len(file))
        ((), 64, {'format': 'pt'})
    """
    first = read(0, min(length, first_bytes))
    end = _LENGTH_BYTES + header_length(first, length)
    data = b"".join([first, read(len(first), end)]) if end > len(first) else first
    return decode_header_and_metadata(data, length)


def decode_header(data: bytes | bytearray | memoryview, file_length: int) -> tuple[tuple[HeaderEntry, ...], int]:
    """Return a safetensors file's entries and the offset of its data.

    Args:
        data: Beginning of the file, at least its header; any further bytes are ignored.
        file_length: Length of the whole file, in bytes.

    Returns:
        The entries in the order of their bytes, and the offset of the data in the file.

    Raises:
        CorruptCheckpoint: The header is invalid, or its entries don't tile the rest of the file exactly.

    Examples:
        >>> entries = (HeaderEntry("w", "F32", (2, 3), 0, 24),)
        >>> decode_header(encode_header(entries), 128 + 24) == (entries, 128)
        True
    """
    entries, data_start, _ = decode_header_and_metadata(data, file_length)
    return entries, data_start


def decode_header_and_metadata(
    data: bytes | bytearray | memoryview, file_length: int
) -> tuple[tuple[HeaderEntry, ...], int, dict[str, str]]:
    """Return a safetensors file's entries, the offset of its data, and its metadata, a dict of strings.

    Args:
        data: Beginning of the file, at least its header.
        file_length: Length of the whole file, in bytes.

    Raises:
        CorruptCheckpoint: The header is invalid, as for `decode_header`.

    Examples:
        >>> decode_header_and_metadata(encode_header([], {"format": "pt"}), 64)
        ((), 64, {'format': 'pt'})
    """
    data_start = _LENGTH_BYTES + header_length(data, file_length)
    if len(data) < data_start:
        heading = "safetensors header: cut off, the data ends before the header does"
        raise CorruptCheckpoint(error_text(heading, found=f"{len(data)} bytes", expected=f"{data_start} or more"))
    fields = parse_json(data[_LENGTH_BYTES:data_start], "safetensors header")
    if not isinstance(fields, dict) or data[_LENGTH_BYTES] != ord("{"):
        raise CorruptCheckpoint(error_text("safetensors header: not a JSON object"))
    metadata = fields.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CorruptCheckpoint(error_text(f"safetensors header: {_METADATA} does not map strings to strings"))
    lengths: dict[tuple[str, tuple[int, ...]], int] = {}  # models repeat few shapes in many layers
    entries = [_entry(name, spec, lengths) for name, spec in fields.items()]
    entries.sort(key=itemgetter(3, 4))
    # Gaps and overlaps are refused: a gap could hide data, and entries that share bytes make a small file large.
    end = 0
    for entry in entries:
        if entry.start != end:
            raise CorruptCheckpoint(_tiling_problem(entry, end, entry.stop - entry.start))
        end = entry.stop
    if data_start + end != file_length:
        heading = "safetensors header: the entries do not end where the file does"
        raise CorruptCheckpoint(error_text(heading, found=f"{file_length} bytes", expected=f"{data_start + end} bytes"))
    return tuple(entries), data_start, metadata


def _entry(name: str, spec: Any, lengths: dict[tuple[str, tuple[int, ...]], int]) -> HeaderEntry:
    """Check one member of a header's JSON object, and return the entry that it describes.

    Args:
        name: Name of the member, which is the tensor's.
        spec: Value of the member: dtype, shape and byte range.
        lengths: Known lengths in bytes, by the file's dtype name (such as F32) and shape; new ones are added.
    """
    try:
        name.encode("utf-8")
        tag, shape, (start, stop) = spec["dtype"], spec["shape"], spec["data_offsets"]
        if len(spec) != 3 or type(tag) is not str or type(shape) is not list:
            raise ValueError("expected a dtype, a shape, two data_offsets and nothing else")
        # Types are checked before any look-up, since 1.0 and True are equal to 1.
        are_numbers = {*map(type, shape), type(start), type(stop)} == {int}
        if not are_numbers or min(start, stop, *shape) < 0 or max(start, stop, *shape) > MAX_INT:
            raise ValueError("a number is negative, too large or not an integer")
        sizes = tuple(shape)
        length = lengths.get((tag, sizes))
        if length is None:
            length = lengths[tag, sizes] = byte_length(tag, sizes)
        if stop - start != length:
            raise ValueError(f"data_offsets span {stop - start} bytes, but the shape takes {length} bytes of {tag}")
    except (TypeError, ValueError, KeyError) as error:
        raise CorruptCheckpoint(error_text(f"safetensors header: entry {_short(name)}: {error}")) from None
    return HeaderEntry(name, tag, sizes, start, stop)

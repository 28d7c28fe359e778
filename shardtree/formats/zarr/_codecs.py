"""Codecs: which of them the zarr package may decode, and checks of a chunk's headers before its decoder runs."""

from __future__ import annotations

import bz2
import lzma
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from ...errors import CorruptCheckpoint, UnsafeFile, UnsupportedValue, error_text
from ...kit import limits
from ._array import StoredArray, unsound_array
from ._cells import inner_counts

_HARMLESS = {
    *("bytes", "transpose", "sharding_indexed", "gzip", "zstd", "blosc", "crc32c"),
    *("zlib", "bz2", "lzma", "lz4", "shuffle", "delta", "fixedscaleoffset", "quantize", "bitround", "packbits"),
    *("crc32", "adler32", "fletcher32", "jenkins_lookup3", "astype"),
}
"""Allowlist of codecs that only convert bytes and numbers; a filter of numcodecs can be anything, even pickle."""


def check_harmless(codecs: Iterable[Any], what: str) -> None:
    """Raise unless decoding with some codecs, including nested ones, is known to run no code from the file.

    Args:
        codecs: Codecs of v2 or v3 metadata, each with an "id" or "name".
        what: Name of the array, for errors.

    Raises:
        UnsafeFile: A codec isn't among those that are known to be harmless.
        CorruptCheckpoint: A list has something that isn't a codec.

    Examples:
        >>> check_harmless([{"id": "zstd", "level": 3}, {"name": "numcodecs.delta"}], "'w'")
        >>> check_harmless([{"id": "pickle"}], "'w'")
        Traceback (most recent call last):
        ...
        shardtree.errors.UnsafeFile: open: 'w' has a codec that is not known to be harmless
          found 'pickle'
          Rewrite the array without this codec.
    """
    for codec in codecs:
        name, configuration = codec_parts(codec, what)
        if not is_harmless(name):
            fix = "Rewrite the array without this codec."
            codec_name = repr(name)[:200]
            raise UnsafeFile(
                error_text(f"open: {what} has a codec that is not known to be harmless", found=codec_name, fix=fix)
            )
        # Sharding nests codecs, and a harmful one may be inside.
        for group in ("codecs", "index_codecs"):
            check_harmless(codec_list(configuration.get(group, []), what), what)


def is_harmless(name: object) -> bool:
    """Return whether decoding with a codec of this name is known to run no code from the file.

    Examples:
        >>> is_harmless("numcodecs.delta"), is_harmless("pickle")
        (True, False)
    """
    return isinstance(name, str) and name.removeprefix("numcodecs.") in _HARMLESS


def codec_list(value: Any, what: str) -> list[Any]:
    """Return a value that must be a list of codecs.

    Raises:
        CorruptCheckpoint: The value isn't a list.
    """
    if not isinstance(value, list):
        raise _no_codec(value, what)
    return value


def codec_parts(codec: Any, what: str) -> tuple[str, dict[str, Any]]:
    """Return a codec's name and configuration.

    Raises:
        CorruptCheckpoint: The value isn't a codec with one name.

    Examples:
        >>> codec_parts({"name": "bytes", "configuration": {"endian": "little"}}, "'w'")
        ('bytes', {'endian': 'little'})
    """
    if isinstance(codec, str):  # In zarr v3, a codec without configuration may be its name.
        return codec, {}
    if isinstance(codec, dict):
        configuration = codec.get("configuration", {})
        # There must be one name: of two, this package might check one, and the zarr package decode by the other.
        names = [codec[field] for field in ("name", "id") if field in codec]
        sound = len(names) == 1 and isinstance(names[0], str) and isinstance(configuration, dict)
        if sound and "id" not in configuration:
            return names[0], configuration
    raise _no_codec(codec, what)


def is_plain(codecs: list[Any], item_size: int, what: str) -> bool:
    """Return whether v3 codecs leave little-endian row-major bytes as they are.

    Examples:
        >>> is_plain([{"name": "bytes", "configuration": {"endian": "little"}}], 4, "'w'")
        True
    """
    if len(codecs) != 1:
        return False
    name, configuration = codec_parts(codecs[0], what)
    return name == "bytes" and (item_size == 1 or configuration.get("endian") == "little")


def _no_codec(value: Any, what: str) -> CorruptCheckpoint:
    return unsound_array(what, f"{value!r}"[:200], "a codec")


_SLACK_BYTES = 1024 * 1024
_TIMES_WIDER = 16
"""Upper bound of the growth of elements by a filter, which may store them in a wider type."""

_BLOSC = struct.Struct("<BBBBIII")
"""A blosc header: versions of format and compressor, flags, item size, then decoded, block and packed length."""
_BLOSC_MOST_BYTES = 2**31 - 1 - _BLOSC.size
_BLOSC_RAW = 2

_ZSTD_FRAME = b"\x28\xb5\x2f\xfd"
_ZSTD_BLOCK_BYTES = 128 * 1024
_ZSTD_SKIPPED = range(0x184D2A50, 0x184D2A60)
_CHECKSUM_BYTES = 4
_NOT_STORED = 2**64 - 1

_STREAMS: dict[str, Callable[[], Any]] = {
    "zlib": zlib.decompressobj,
    "gzip": partial(zlib.decompressobj, 31),
    "bz2": bz2.BZ2Decompressor,
    "lzma": partial(lzma.LZMADecompressor, memlimit=2**30),
}


def check_headers(array: StoredArray, data: bytes, what: str) -> None:
    """Raise if a chunk file is shorter than its codecs' headers say, or would decode to far more than its elements.

    Args:
        array: Array with the codecs.
        data: Content of the file.
        what: Name of the file, for errors.

    Raises:
        CorruptCheckpoint: The file is cut off, would decode to far more bytes, or isn't in the compressor's format.
        UnsupportedValue: There are several compressors, a codec except crc32c after the compressor, nested sharding, or
            sharding beside other codecs.

    Examples:
        >>> import torch
        >>> document = {"filters": None, "compressor": {"id": "zlib"}}
        >>> array = StoredArray("w", "w", torch.float32, (2,), (2,), document=document)
        >>> check_headers(array, zlib.compress(bytes(8)), "'w/0'")
        >>> check_headers(array, zlib.compress(bytes(2**22)), "'w/0'")
        Traceback (most recent call last):
        ...
        shardtree.errors.CorruptCheckpoint: load: 'w/0' would decode to more bytes than a chunk has
          expected at most 1048704 bytes
          The file was damaged, or made to fill the memory; load another checkpoint.
    """
    fields = array.document
    if "codecs" not in fields:
        last = fields.get("compressor")
        codecs = [*(fields.get("filters") or []), *([] if last is None else [last])]
    else:
        codecs = fields["codecs"]
    name, configuration = codec_parts(codecs[0], what) if codecs else ("", {})
    if name == "sharding_indexed" and len(codecs) == 1:
        _check_inner(array, configuration, data, what)
    else:
        _check_chunk(codecs, data, array.file_bytes, what)


def _check_chunk(codecs: Sequence[Any], data: bytes, nbytes: int, what: str) -> None:
    parts = [codec_parts(codec, what) for codec in codecs]
    names = [name.removeprefix("numcodecs.") for name, _ in parts]
    if "sharding_indexed" in names:
        codec_names, fix = ", ".join(names)[:200], "Rewrite it with sharding as the only codec."
        raise UnsupportedValue(
            error_text(f"load: {what} has codecs around its inner chunks", found=codec_names, fix=fix)
        )
    if names and names[-1] == "crc32c":
        # Zarr v2 and v3 have this field in different places, and each ignores the other's.
        if isinstance(codecs[-1], dict) and "start" in (codecs[-1].get("location"), parts[-1][1].get("location")):
            fix = "Rewrite it with its checksum at the end."
            raise UnsupportedValue(error_text(f"load: {what} begins with its checksum, not with data", fix=fix))
        names, data = names[:-1], data[:-_CHECKSUM_BYTES]
    if not _DECODED_LENGTHS.keys() & set(names):
        return
    # The decoded length of a second compressor is only known after decoding with the first one.
    if _DECODED_LENGTHS.keys() & set(names[:-1]):
        found, fix = ", ".join(names)[:200], "Rewrite it with one compressor, as the last codec."
        raise UnsupportedValue(error_text(f"load: {what} has a compressor before its last codec", found=found, fix=fix))
    # Against decompression bombs, the decoded length is read from headers, or found in steps, before it is allocated.
    most = _TIMES_WIDER * nbytes + _SLACK_BYTES
    try:
        length = _DECODED_LENGTHS[names[-1]](data, most)
    except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError, IndexError, struct.error) as error:
        fix = "The file was damaged or cut off; load another checkpoint."
        text = error_text(f"load: {what} cannot be decoded", found=str(error)[:200], fix=fix)
        raise CorruptCheckpoint(text) from error
    if length > most:
        fix = "The file was damaged, or made to fill the memory; load another checkpoint."
        text = f"load: {what} would decode to more bytes than a chunk has"
        raise CorruptCheckpoint(error_text(text, expected=f"at most {most} bytes", fix=fix))


# Each function returns the length of the decoded bytes; if that exceeds `most`, any number above `most`.


def _streamed_length(stream: Callable[[], Any], data: bytes, most: int) -> int:
    # These formats don't store their length, or can lie about it, so that they are decoded in steps and discarded.
    length = 0
    # A gzip file may consist of several streams, one after the other.
    while data and length <= most:
        decoder = stream()
        while not decoder.eof and length <= most:
            step = len(decoder.decompress(data, limits.STEP_BYTES))
            data = decoder.unconsumed_tail if hasattr(decoder, "unconsumed_tail") else b""
            if not step and not data and not decoder.eof:
                return length  # The data is cut off, which the decoding itself will report.
            length += step
        data = decoder.unused_data.lstrip(b"\0")  # gzip may be padded.
    return length


def _blosc_length(data: bytes, most: int) -> int:
    """Return the decoded length in a blosc header, after comparing the header's packed length with the data's length.

    References:
        C-Blosc, README_CHUNK_FORMAT.rst.
    """
    *_, flags, _, length, block, packed_length = _BLOSC.unpack_from(data)
    # c-blosc checks neither: it doesn't get the number of bytes, and has lengths as signed numbers.
    if packed_length > len(data) or length > _BLOSC_MOST_BYTES:
        raise ValueError(f"{len(data)} bytes, but the header says {packed_length}, decoded {length}")
    # Incompressible data is stored raw; otherwise a table of the blocks' offsets follows the header.
    blocks = -(-length // block) if block else 0
    least = length if flags & _BLOSC_RAW else 4 * blocks
    if packed_length < _BLOSC.size + least:
        raise ValueError(f"a header of {packed_length} packed bytes, but there are at least {_BLOSC.size + least}")
    return int(length)


def _lz4_length(data: bytes, most: int) -> int:
    (length,) = struct.unpack_from("<I", data)
    # A byte of lz4 decodes to at most 255 bytes.
    if length > 255 * len(data):
        raise ValueError(f"{len(data)} bytes, but the header says {length} decoded")
    return int(length)


def _zstd_length(data: bytes, most: int) -> int:
    """Return the sum of the decoded lengths of zstd frames, by their headers.

    A frame whose header has no length counts with an upper bound. Frames aren't read once the sum exceeds `most`.

    References:
        RFC 8878, section 3.1.1.
    """
    length, at = 0, 0
    while at < len(data) and length <= most:
        if int.from_bytes(data[at : at + 4], "little") in _ZSTD_SKIPPED:
            at += 8 + int.from_bytes(data[at + 4 : at + 8], "little")
            continue
        if data[at : at + 4] != _ZSTD_FRAME:
            raise ValueError("not a zstd frame")
        flags = data[at + 4]
        is_single = bool(flags & 0x20)
        size = (1 if is_single else 0, 2, 4, 8)[flags >> 6]
        at += 5 + (not is_single) + (0, 1, 2, 4)[flags & 3]
        content_size = int.from_bytes(data[at : at + size], "little") + (256 if size == 2 else 0)
        at += size
        blocks, at = _zstd_blocks(data, at)
        at += _CHECKSUM_BYTES if flags & 4 else 0
        length += content_size if size else blocks
    return length


def _zstd_blocks(data: bytes, at: int) -> tuple[int, int]:
    """Return the upper bound of the decoded length of a zstd frame's blocks, and the offset after the last block."""
    length, is_last = 0, False
    while not is_last:
        header = int.from_bytes(data[at : at + 3], "little")
        kind, count, is_last = header >> 1 & 3, header >> 3, bool(header & 1)
        # A raw or repeated block has its length in its header; others decode to at most 128 KiB.
        length += count if kind < 2 else _ZSTD_BLOCK_BYTES
        at += 3 + (1 if kind == 1 else count)
        if at > len(data):
            raise ValueError(f"{len(data)} bytes, but the zstd blocks end at {at} or later")
    return length, at


_DECODED_LENGTHS: dict[str, Callable[[bytes, int], int]] = {
    **{name: partial(_streamed_length, stream) for name, stream in _STREAMS.items()},
    "blosc": _blosc_length,
    "lz4": _lz4_length,
    "zstd": _zstd_length,
}


def _check_inner(array: StoredArray, configuration: dict[str, Any], data: bytes, what: str) -> None:
    """Check the headers of each inner chunk of a file, like `check_headers`.

    Args:
        array: Array with the codecs.
        configuration: Configuration of the sharding codec.
        data: Content of the file.
        what: Name of the file, for errors.
    """
    # The index must have a form that this package reads as the zarr package does: else chunks would be unchecked.
    index, inside = (codec_list(configuration.get(name), what) for name in ("index_codecs", "codecs"))
    names = [codec_parts(codec, what)[0] for codec in index]
    if names not in (["bytes"], ["bytes", "crc32c"]) or not is_plain(index[:1], 8, what):
        codec_names, fix = ", ".join(names)[:200], "Rewrite the array with the codecs that are expected here."
        heading = f"load: {what}: unsupported index_codecs of the zarr shard"
        expected = "bytes, little-endian, and optionally crc32c"
        raise UnsupportedValue(error_text(heading, found=codec_names, expected=expected, fix=fix))
    count = prod(inner_counts(array))
    size = count * 16 + _CHECKSUM_BYTES * (len(names) - 1)
    if size > len(data):
        found, expected = f"{len(data)} bytes", f"an index of {size} bytes"
        fix = "The file was damaged or cut off; load another checkpoint."
        raise CorruptCheckpoint(error_text(f"load: {what} is cut off", found=found, expected=expected, fix=fix))
    start = 0 if configuration.get("index_location") == "start" else len(data) - size
    entries = np.frombuffer(data, "<u8", 2 * count, start).reshape(count, 2)
    for begin, length in entries[(entries != _NOT_STORED).any(axis=1)].tolist():
        _check_chunk(inside, data[begin : begin + length], array.file_bytes // count, what)

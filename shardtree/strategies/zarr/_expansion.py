"""How long a compressed chunk becomes: found out before it is decoded, so that a small file can't fill the memory."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from ...errors import CorruptCheckpoint, UnsupportedValue, error_text
from ._array import StoredArray
from ._codecs import codec_list, codec_parts
from ._shard_index import inner_counts

_STEP_BYTES = 1024 * 1024
_SLACK_BYTES = 1024 * 1024
_TIMES_WIDER = 16
"""A filter may store elements as wider ones."""

_ZSTD_BLOCK_BYTES = 128 * 1024
_CHECKSUM_BYTES = 4
_NOT_STORED = 2**64 - 1

_STREAMS: dict[str, Callable[[], Any]] = {
    "zlib": zlib.decompressobj,
    "gzip": partial(zlib.decompressobj, 31),
    "bz2": bz2.BZ2Decompressor,
    "lzma": partial(lzma.LZMADecompressor, memlimit=2**30),
}
_HEADED = {"blosc": 4, "lz4": 0}
"""Where these write the length, in four bytes."""

_COMPRESSORS = {*_STREAMS, *_HEADED, "zstd"}


def check_expansion(array: StoredArray, data: bytes, what: str) -> None:
    """Raise unless decoding one of an array's chunk files takes about as much memory as its elements do.

    Args:
        array: whose codecs are to be undone.
        data: the file's content.
        what: the file, for messages.

    Raises:
        CorruptCheckpoint: it becomes much longer, or isn't what its compressor writes.
        UnsupportedValue: it went through several compressors, or one that something else follows.

    Examples:
        >>> import torch
        >>> document = {"filters": None, "compressor": {"id": "zlib"}}
        >>> array = StoredArray("w", "w", torch.float32, (2,), (2,), document=document)
        >>> check_expansion(array, zlib.compress(bytes(8)), "'w/0'")
        >>> check_expansion(array, zlib.compress(bytes(2**22)), "'w/0'")
        Traceback (most recent call last):
        ...
        shardtree.errors.CorruptCheckpoint: load: 'w/0' becomes longer than a chunk is
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
    if name != "sharding_indexed":
        _check_chunk(codecs, data, array.file_bytes, what)
        return
    if len(codecs) > 1:
        _check_chunk(codecs[1:], data, array.file_bytes, what)
        raise UnsupportedValue(error_text(f"load: {what} has chunks in chunks, and codecs around these"))
    _check_inner(array, configuration, data, what)


def _check_chunk(codecs: Sequence[Any], data: bytes, nbytes: int, what: str) -> None:
    names = [codec_parts(codec, what)[0].removeprefix("numcodecs.") for codec in codecs]
    if names and names[-1] == "crc32c":
        names, data = names[:-1], data[:-_CHECKSUM_BYTES]
    if not _COMPRESSORS.intersection(names):
        return
    if _COMPRESSORS.intersection(names[:-1]):
        found, fix = ", ".join(names)[:200], "Rewrite it with one compressor, as the last codec."
        raise UnsupportedValue(error_text(f"load: {what} has compressors among its codecs", found=found, fix=fix))
    most = _TIMES_WIDER * nbytes + _SLACK_BYTES
    try:
        length = _decoded_length(names[-1], data, most)
    except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError, IndexError) as error:
        raise CorruptCheckpoint(error_text(f"load: {what} can't be decoded", found=str(error)[:200])) from error
    if length > most:
        fix = "The file was damaged, or made to fill the memory; load another checkpoint."
        expected = f"at most {most} bytes"
        raise CorruptCheckpoint(error_text(f"load: {what} becomes longer than a chunk is", expected=expected, fix=fix))


def _decoded_length(compressor: str, data: bytes, most: int) -> int:
    """Return how many bytes compressed ones become; where that is more than `most`, any number above it."""
    if compressor in _STREAMS:
        return _streamed_length(_STREAMS[compressor], data, most)
    if compressor == "zstd":
        return _zstd_length(data)
    at = _HEADED[compressor]
    return int.from_bytes(data[at : at + 4], "little")


def _streamed_length(stream: Callable[[], Any], data: bytes, most: int) -> int:
    length = 0
    while data and length <= most:
        one = stream()
        while not one.eof and length <= most:
            step = len(one.decompress(data, _STEP_BYTES))
            data = one.unconsumed_tail if hasattr(one, "unconsumed_tail") else b""
            if not step and not data and not one.eof:
                return length  # it is cut off: decoding it says so
            length += step
        data = one.unused_data.lstrip(b"\0")  # gzip may be padded
    return length


def _zstd_length(data: bytes) -> int:
    """Return what a zstd frame's header says, or else the most that its blocks can have.

    References:
        RFC 8878, section 3.1.1.
    """
    if data[:4] != b"\x28\xb5\x2f\xfd":
        raise ValueError("not a zstd frame")
    flags = data[4]
    is_single = bool(flags & 0x20)
    size = (1 if is_single else 0, 2, 4, 8)[flags >> 6]
    at = 5 + (not is_single) + (0, 1, 2, 4)[flags & 3]
    if size:
        return int.from_bytes(data[at : at + size], "little") + (256 if size == 2 else 0)
    length = 0
    while at + 3 <= len(data):
        header = int.from_bytes(data[at : at + 3], "little")
        kind, count = header >> 1 & 3, header >> 3
        length += count if kind < 2 else _ZSTD_BLOCK_BYTES
        at += 3 + (1 if kind == 1 else count)
        if header & 1:
            break
    return length


def _check_inner(array: StoredArray, configuration: dict[str, Any], data: bytes, what: str) -> None:
    """Check each chunk inside of a file."""
    index, inside = (codec_list(configuration.get(name), what) for name in ("index_codecs", "codecs"))
    names = [codec_parts(codec, what)[0] for codec in index]
    if names not in (["bytes"], ["bytes", "crc32c"]) or any(
        codec_parts(c, what)[0] == "sharding_indexed" for c in inside
    ):
        found, fix = (
            ", ".join(names)[:200],
            "Rewrite it with an index of bytes and crc32c, and no chunks in inner chunks.",
        )
        raise UnsupportedValue(error_text(f"load: {what} has inner chunks in an unknown form", found=found, fix=fix))
    count = prod(inner_counts(array))
    size = count * 16 + _CHECKSUM_BYTES * (len(names) - 1)
    if size > len(data):
        expected = f"an index of {size} bytes"
        raise CorruptCheckpoint(error_text(f"load: {what} is cut off", found=f"{len(data)} bytes", expected=expected))
    start = 0 if configuration.get("index_location") == "start" else len(data) - size
    entries = np.frombuffer(data, "<u8", 2 * count, start).reshape(count, 2)
    for begin, length in entries[(entries != _NOT_STORED).any(axis=1)].tolist():
        _check_chunk(inside, data[begin : begin + length], array.file_bytes // count, what)

"""Codecs: whether chunks are plain bytes, and which others may be undone by the zarr package."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...errors import CorruptCheckpoint, UnsafeFile, error_text

_HARMLESS = {
    *("bytes", "transpose", "sharding_indexed", "gzip", "zstd", "blosc", "crc32c"),
    *("zlib", "bz2", "lzma", "lz4", "shuffle", "delta", "fixedscaleoffset", "quantize", "bitround", "packbits"),
    *("crc32", "adler32", "fletcher32", "jenkins_lookup3", "astype"),
}
"""A filter of numcodecs can be anything, pickle among them; these turn bytes into bytes and numbers into numbers."""


def check_harmless(codecs: Iterable[Any], what: str) -> None:
    """Raise unless undoing these codecs runs no code that the file brings.

    Args:
        codecs: as v2 or v3 metadata describes them, each with its "id" or "name"; those inside of others too.
        what: what was encoded, for messages.

    Raises:
        UnsafeFile: a codec is none of those that are known to be harmless.
        CorruptCheckpoint: something isn't a codec.

    Examples:
        >>> check_harmless([{"id": "zstd", "level": 3}, {"name": "numcodecs.delta"}], "'w'")
        >>> check_harmless([{"id": "pickle"}], "'w'")
        Traceback (most recent call last):
        ...
        shardtree.errors.UnsafeFile: open: 'w' has a codec that isn't known to be harmless
          found 'pickle'
          Rewrite the array without it.
    """
    for codec in codecs:
        name, configuration = codec_parts(codec, what)
        plain = name.removeprefix("numcodecs.")
        if plain not in _HARMLESS:
            fix = "Rewrite the array without it."
            found = repr(name)[:200]
            raise UnsafeFile(
                error_text(f"open: {what} has a codec that isn't known to be harmless", found=found, fix=fix)
            )
        for group in ("codecs", "index_codecs"):
            check_harmless(codec_list(configuration.get(group, []), what), what)


def codec_list(value: Any, what: str) -> list[Any]:
    """Return a list of codecs as one.

    Raises:
        CorruptCheckpoint: it isn't a list.
    """
    if not isinstance(value, list):
        raise _no_codec(value, what)
    return value


def codec_parts(codec: Any, what: str) -> tuple[str, dict[str, Any]]:
    """Return a codec's name and configuration.

    Raises:
        CorruptCheckpoint: it has none.

    Examples:
        >>> codec_parts({"name": "bytes", "configuration": {"endian": "little"}}, "'w'")
        ('bytes', {'endian': 'little'})
    """
    if isinstance(codec, str):  # zarr v3 lets a codec without configuration be its name
        return codec, {}
    if isinstance(codec, dict):
        configuration = codec.get("configuration", {})
        # By which of two names it is called would be for its reader to say, so it may have but one.
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


def _no_codec(found: Any, what: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(error_text(f"open: {what} is not sound", found=f"{found!r}"[:200], expected="a codec"))

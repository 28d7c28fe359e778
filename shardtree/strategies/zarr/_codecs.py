"""Codecs: whether chunks are plain bytes, and which other codecs the zarr package may decode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...errors import CorruptCheckpoint, UnsafeFile, error_text

_HARMLESS = {
    *("bytes", "transpose", "sharding_indexed", "gzip", "zstd", "blosc", "crc32c"),
    *("zlib", "bz2", "lzma", "lz4", "shuffle", "delta", "fixedscaleoffset", "quantize", "bitround", "packbits"),
    *("crc32", "adler32", "fletcher32", "jenkins_lookup3", "astype"),
}
"""An allowlist, since a filter of numcodecs can be anything, pickle too; these only convert bytes and numbers."""


def check_harmless(codecs: Iterable[Any], what: str) -> None:
    """Raise unless decoding with these codecs is known to run no code from the file.

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
        # Sharding nests codecs, and the harmful one may be inside.
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
        # Exactly one name: of two, we might check one, and the zarr package decode by the other.
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

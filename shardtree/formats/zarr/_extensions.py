"""Extensions of zarr 3: unknown ones are refused, unless the metadata marks them as optional."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ...errors import UnsupportedValue, error_text
from ._codecs import is_harmless

_NODE = {"zarr_format", "node_type", "attributes"}
_GROUP = _NODE | {"consolidated_metadata"}
_ARRAY = _NODE | {"shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value", "codecs"}
_ARRAY |= {"storage_transformers", "dimension_names"}
_OBJECT = {"name", "configuration", "must_understand"}

_CONFIGURATIONS: Mapping[str, Collection[str]] = {
    "regular": {"chunk_shape"},
    "default": {"separator"},
    "v2": {"separator"},
    "bytes": {"endian"},
    "sharding_indexed": {"chunk_shape", "codecs", "index_codecs", "index_location"},
    "crc32c": (),
}
"""Known fields of the configurations that this package reads. The zarr package checks those of the codecs it runs."""


def check_group(fields: Mapping[str, Any], what: str) -> None:
    """Raise if the metadata of a group has an unknown field that must be understood.

    Args:
        fields: Content of the zarr.json.
        what: Name of the file, for errors.

    Raises:
        UnsupportedValue: There is such a field.

    Examples:
        >>> check_group({"attributes": {}, "note": {"must_understand": False}}, "'zarr.json'")
        >>> check_group({"attributes": {}, "note": {}}, "'zarr.json'")
        Traceback (most recent call last):
        ...
        shardtree.errors.UnsupportedValue: open: 'zarr.json' has unknown extensions
          field 'note'
          Rewrite it without them, or read it with the program that wrote it.
    """
    _refuse(_others("field", fields, _GROUP), what)


def understood(fields: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return the metadata of an array without unknown extensions that may be ignored.

    Args:
        fields: Content of the zarr.json.
        what: Name of the file, for errors.

    Raises:
        UnsupportedValue: There is an unknown extension that must be understood.

    Examples:
        >>> ignored = {"name": "mine", "must_understand": False}
        >>> understood({"codecs": ["bytes", ignored], "mine": ignored}, "'w/zarr.json'")
        {'codecs': ['bytes']}
    """
    known = {name: value for name, value in fields.items() if name in _ARRAY}
    for field, needed in (("codecs", _known_codecs), ("storage_transformers", _needed)):
        if isinstance(known.get(field), list):
            known[field] = needed(known[field])
    wrong = [
        *_others("field", fields, _ARRAY),
        *_unknown("chunk grid", fields.get("chunk_grid"), {"regular"}),
        *_unknown("chunk key encoding", fields.get("chunk_key_encoding"), {"default", "v2"}),
        *_unknown_in_codecs(known.get("codecs")),
    ]
    # By the spec, a transformer may change the storage of chunks in any way.
    if known.get("storage_transformers"):
        wrong.append("storage transformers")
    _refuse(wrong, what)
    return known


def _needed(extensions: list[Any]) -> list[Any]:
    return [extension for extension in extensions if not _may_ignore(extension)]


def _known_codecs(codecs: list[Any]) -> list[Any]:
    """Return codecs without the unknown ones that may be ignored; these are left out of nested codecs too."""
    known: list[Any] = []
    for codec in codecs:
        if _may_ignore(codec) and not is_harmless(codec.get("name")):
            continue
        configuration = codec.get("configuration") if isinstance(codec, dict) else None
        if isinstance(configuration, dict):
            lists = {name: _known_codecs(value) for name, value in configuration.items() if _has_codecs(name, value)}
            codec = {**codec, "configuration": configuration | lists}
        known.append(codec)
    return known


def _has_codecs(name: str, value: Any) -> bool:
    return name in ("codecs", "index_codecs") and isinstance(value, list)


def _unknown_in_codecs(codecs: Any) -> Iterator[str]:
    for codec in codecs if isinstance(codecs, list) else ():
        yield from _unknown("codec", codec, None)
        configuration = codec.get("configuration") if isinstance(codec, dict) else None
        for name, value in configuration.items() if isinstance(configuration, dict) else ():
            if _has_codecs(name, value):
                yield from _unknown_in_codecs(value)


def _unknown(kind: str, extension: Any, names: Collection[str] | None) -> Iterator[str]:
    """Yield the unknown parts of an extension: its name, or fields of it and of its configuration.

    Args:
        kind: Kind of the extension, such as "codec", for errors.
        extension: Object or name of the extension; other values are refused elsewhere.
        names: Known names; None for codecs, whose names are checked elsewhere.
    """
    fields = {"name": extension} if isinstance(extension, str) else extension
    name = fields.get("name") if isinstance(fields, dict) else None
    if not isinstance(name, str):
        return
    if names is not None and name not in names:
        yield f"{kind} {name!r}"[:200]
        return
    yield from _others(f"{kind} {name!r}: field", fields, _OBJECT)
    configuration = fields.get("configuration")
    if name in _CONFIGURATIONS and isinstance(configuration, dict):
        yield from _others(f"{kind} {name!r}: configuration", configuration, _CONFIGURATIONS[name])


def _others(kind: str, fields: Mapping[str, Any], known: Collection[str]) -> Iterator[str]:
    return (f"{kind} {name!r}"[:200] for name in fields if name not in known and not _may_ignore(fields[name]))


def _may_ignore(value: Any) -> bool:
    return isinstance(value, dict) and value.get("must_understand") is False


def _refuse(wrong: Iterable[str], what: str) -> None:
    if offenders := [*wrong]:
        text = f"open: {what} has unknown extensions"
        fix = "Rewrite it without them, or read it with the program that wrote it."
        raise UnsupportedValue(error_text(text, offenders=offenders, fix=fix))

"""The metadata of arrays: reads .zarray (v2) and zarr.json (v3) of any program, and makes our own zarr.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, TypeGuard

import torch

from ...errors import CorruptCheckpoint, UnsupportedValue, error_text
from ...kit import ShardedObject, dtype_from_name, dtype_name, parse_json
from ._array import StoredArray, checked_shapes, dtype_of_v2, dtype_of_v3, unsound_array, zarr_name
from ._codecs import check_harmless, codec_list, codec_parts, is_plain
from ._extensions import understood

# This section reads .zarray, which Megatron-Core and zarr-python before version 3 write.

ARRAY_FILE = ".zarray"


def decode_v2(data: bytes, name: str, where: str) -> StoredArray | None:
    """Return the array that a .zarray describes; None if torch lacks its dtype.

    Args:
        data: Bytes of the file.
        name: Folder of the array, which is also the tensor's key.
        where: Path or URL of the file, for errors.

    Raises:
        CorruptCheckpoint: The file isn't sound.
        UnsafeFile: A codec could run code.
    """
    what = repr(where)
    fields = parse_json(data, where)
    if not isinstance(fields, dict) or fields.get("zarr_format") != 2:
        raise CorruptCheckpoint(
            error_text(f"open: {what} has invalid zarr metadata", expected="the metadata of a zarr v2 array")
        )
    dtype, is_little = dtype_of_v2(fields.get("dtype"), what)
    if dtype is None:
        return None
    filters = codec_list(fields.get("filters") or [], what)
    compressor = fields.get("compressor")
    # Codecs are checked when the array is opened rather than decoded, so that a listing reports the array too.
    check_harmless([*filters, *([] if compressor is None else [compressor])], what)
    shape, chunk = checked_shapes((fields.get("shape"), fields.get("chunks")), dtype.itemsize, what)
    plain = not filters and compressor is None and (is_little or dtype.itemsize == 1)
    return StoredArray(
        name,
        name,
        dtype,
        shape,
        chunk,
        prefix="",
        separator=_choice(fields, "dimension_separator", (".", "/"), what),
        fill=fields.get("fill_value"),
        raw=plain and (_choice(fields, "order", ("C", "F"), what) == "C" or len(shape) < 2),
        document=fields,
    )


def _choice(fields: dict[str, Any], field: str, choices: tuple[str, ...], what: str) -> str:
    choice = fields.get(field, choices[0])
    if choice not in choices:
        choice = f"{field} {choice!r}"[:200]
        raise CorruptCheckpoint(
            error_text(f"open: {what} has invalid zarr metadata", found=choice, expected=" or ".join(choices))
        )
    return str(choice)


# This section reads zarr.json of any writer, and writes our own.

NODE_FILE = "zarr.json"
OURS = "shardtree"
"""Attribute of groups and arrays with our own fields, which zarr's metadata lacks."""


def decode_v3(fields: Mapping[str, Any], name: str, where: str) -> StoredArray | None:
    """Return the array that a zarr.json describes; None if torch lacks its dtype.

    Args:
        fields: Content of the file.
        name: Folder of the array, which is also the tensor's key unless our own attributes have another key.
        where: Path or URL of the file, for errors.

    Raises:
        CorruptCheckpoint: The file isn't sound.
        UnsafeFile: A codec could run code.
        UnsupportedValue: An extension is unknown.
    """
    what = repr(where)
    stored_dtype = dtype_of_v3(fields.get("data_type"), what)
    if stored_dtype is None:
        return None
    fields = understood(fields, what)
    codecs = codec_list(fields.get("codecs"), what)
    check_harmless(codecs, what)
    key, dtype = _own_attributes(fields, name, stored_dtype)
    chunk = _configuration(fields, "chunk_grid", "regular", what).get("chunk_shape")
    inner, inside = _sharding(codecs, dtype.itemsize, what)
    shapes = checked_shapes((fields.get("shape"), chunk, *([] if inner is None else [inner])), dtype.itemsize, what)
    if inner is not None and any(size % step for size, step in zip(shapes[1], shapes[2], strict=True)):
        raise unsound_array(what, f"chunks {shapes[1]} of {shapes[2]}", "a whole number of inner chunks in each")
    prefix, separator = _file_names(fields, what)
    plain = is_plain(codecs, dtype.itemsize, what)
    return StoredArray(
        name,
        key,
        dtype,
        shapes[0],
        shapes[1],
        inner=shapes[2] if len(shapes) > 2 else None,
        prefix=prefix,
        separator=separator,
        fill=fields.get("fill_value"),
        raw=plain or inside is not None,
        index_first=inside is not None and inside["first"],
        index_checked=inside is None or inside["checked"],
        document=fields,
    )


def encode_v3(array: StoredArray) -> dict[str, Any]:
    """Return the content of zarr.json for an array that we save.

    Axes are named after their lengths, since xarray requires axes with equal names to have equal lengths.

    Examples:
        >>> from dataclasses import replace
        >>> array = StoredArray("w", "w", torch.bfloat16, (6, 6), (3, 6))
        >>> document = encode_v3(array)
        >>> document["data_type"], document["dimension_names"], document["attributes"]
        ('uint16', ['size_6', 'size_6_1'], {'shardtree': {'key': 'w', 'dtype': 'bfloat16'}})
        >>> decode_v3(document, "w", "w/zarr.json") == replace(array, fill=0, document=document)
        True
    """
    counts: Counter[int] = Counter()
    names = []
    for size in array.shape:
        names.append(f"size_{size}" + (f"_{counts[size]}" if counts[size] else ""))
        counts[size] += 1
    name = zarr_name(array.dtype)
    # By the spec, the fill value depends on the data type: false, 0, 0.0 or a pair.
    zeros: dict[str, Any] = {"bool": False, "float": 0.0, "complex": [0.0, 0.0]}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(array.shape),
        "data_type": name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(array.chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": array.separator}},
        "fill_value": zeros.get(name.rstrip("0123456789"), 0),
        "codecs": [_bytes_codec(array) if array.inner is None else _sharding_codec(array)],
        "dimension_names": names,
        "attributes": {OURS: {"key": array.key, "dtype": dtype_name(array.dtype)}},
    }


def _bytes_codec(array: StoredArray) -> dict[str, Any]:
    return {"name": "bytes", "configuration": {"endian": "little"} if array.dtype.itemsize > 1 else {}}


def _sharding_codec(array: StoredArray) -> dict[str, Any]:
    return {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": list(array.inner or ()),
            "codecs": [_bytes_codec(array)],
            "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
            "index_location": "end",
        },
    }


def _own_attributes(fields: Mapping[str, Any], name: str, stored_dtype: torch.dtype) -> tuple[str, torch.dtype]:
    """Return the tensor's key and dtype in our own attributes; `name` and `stored_dtype` if there are none."""
    attributes = fields.get("attributes")
    attribute = attributes.get(OURS) if isinstance(attributes, dict) else None
    if not isinstance(attribute, dict):
        return name, stored_dtype
    key, dtype_text = attribute.get("key"), attribute.get("dtype")
    try:
        dtype = dtype_from_name(dtype_text) if isinstance(dtype_text, str) else stored_dtype
    except UnsupportedValue:
        dtype = stored_dtype
    # Another program may have changed the array's type, and kept the attributes.
    return key if _is_key(key) else name, dtype if zarr_name(dtype) == zarr_name(stored_dtype) else stored_dtype


def _is_key(key: Any) -> TypeGuard[str]:
    if not isinstance(key, str) or not key:
        return False
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


def _sharding(codecs: list[Any], item_size: int, what: str) -> tuple[Any, dict[str, bool] | None]:
    """Return the shape of the chunks inside a file, and two facts about the index of these chunks.

    The shape is None if files have no inner chunks. The facts are "first" (the index comes before the chunks) and
    "checked" (a CRC follows the index); they are None unless the inner chunks are plain bytes.
    """
    name, configuration = codec_parts(codecs[0], what) if codecs else ("", {})
    if name != "sharding_indexed" or len(codecs) != 1:
        return None, None
    index = codec_list(configuration.get("index_codecs"), what)
    has_crc = [codec_parts(codec, what)[0] for codec in index[1:]] == ["crc32c"]
    inside = codec_list(configuration.get("codecs"), what)
    plain = is_plain(inside, item_size, what) and is_plain(index[:1], 8, what) and (has_crc or len(index) == 1)
    first = configuration.get("index_location", "end") == "start"
    return configuration.get("chunk_shape"), {"first": first, "checked": has_crc} if plain else None


def _file_names(fields: Mapping[str, Any], what: str) -> tuple[str, str]:
    encoding = fields.get("chunk_key_encoding")
    name, configuration = codec_parts(encoding, what) if encoding is not None else ("default", {})
    if name not in ("default", "v2"):
        raise unsound_array(what, f"chunk key encoding {name!r}"[:200], "'default' or 'v2'")
    separator = configuration.get("separator", "/" if name == "default" else ".")
    if separator not in (".", "/"):
        raise unsound_array(what, f"separator {separator!r}"[:200], "'.' or '/'")
    return "c" if name == "default" else "", separator


def _configuration(fields: Mapping[str, Any], field: str, expected: str, what: str) -> dict[str, Any]:
    name, configuration = codec_parts(fields.get(field), what)
    if name != expected:
        raise unsound_array(what, f"{field} {name!r}"[:200], repr(expected))
    return configuration


def whole_keys(unique_keys: Sequence[str]) -> dict[str, str]:
    """Return the complete unique key for each unique key of an array of objects.

    A unique key ends with the object's index in the array and the array's shape. Old releases of Megatron-Core omitted
    the last number of the shape, which follows from the indices if all objects are given; else the keys stay as they
    are.

    Args:
        unique_keys: Unique keys of the objects in one array.

    Examples:
        >>> whole_keys(["rng/shard_0.0_1", "rng/shard_0.1_1"])
        {'rng/shard_0.0_1': 'rng/shard_0.0_1.2', 'rng/shard_0.1_1': 'rng/shard_0.1_1.2'}
        >>> whole_keys(["rng/shard_0.1_1"])
        {'rng/shard_0.1_1': 'rng/shard_0.1_1'}
    """
    items = {unique_key: ShardedObject.empty_from_unique_key(unique_key) for unique_key in unique_keys}
    shapes = {item.global_shape for item in items.values()}
    shape = min(shapes, default=())
    whole = (*shape[:-1], 1 + max((item.global_offset[-1] for item in items.values() if item.global_offset), default=0))
    if len(shapes) != 1 or shape[-1:] != (-1,) or prod(whole) != len(items):
        return {unique_key: unique_key for unique_key in unique_keys}
    return {unique_key: replace(item, global_shape=whole).unique_key for unique_key, item in items.items()}

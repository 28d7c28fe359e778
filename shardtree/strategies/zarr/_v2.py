"""Arrays of zarr v2, as Megatron-Core and zarr-python before 3 write them: .zarray."""

from __future__ import annotations

from typing import Any

from ...codec import parse_json
from ...errors import CorruptCheckpoint, error_text
from ._array import StoredArray, checked_shapes
from ._codecs import check_harmless, codec_list
from ._dtypes import dtype_of_v2

ARRAY_FILE = ".zarray"


def decode_v2(data: bytes, name: str, where: str) -> StoredArray | None:
    """Return the array that a .zarray describes, None where torch has no such dtype.

    Args:
        data: the file's bytes.
        name: the array's folder, and the tensor's key.
        where: the file's name, for messages.

    Raises:
        CorruptCheckpoint: the file isn't sound.
        UnsafeFile: a codec could run code.
    """
    what = repr(where)
    fields = parse_json(data, where)
    if not isinstance(fields, dict) or fields.get("zarr_format") != 2:
        raise CorruptCheckpoint(error_text(f"open: {what} is not sound", expected="the metadata of a zarr v2 array"))
    dtype, is_little = dtype_of_v2(fields.get("dtype"))
    if dtype is None:
        return None
    filters = codec_list(fields.get("filters") or [], what)
    compressor = fields.get("compressor")
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
    found = fields.get(field, choices[0])
    if found not in choices:
        found = f"{field} {found!r}"[:200]
        raise CorruptCheckpoint(error_text(f"open: {what} is not sound", found=found, expected=" or ".join(choices)))
    return str(found)

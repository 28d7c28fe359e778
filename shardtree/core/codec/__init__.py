"""Encoding and decoding of dtypes, JSON, safetensors headers and trees of values. No files are opened here."""

from __future__ import annotations

from ._addresses import addresses_of
from ._arrays import has_wrong_characters, is_plain_array
from ._crc32 import crc32, crc32_thread_bytes
from ._dtypes import (
    bit_view,
    byte_buffer,
    check_storable,
    device_bits,
    dtype_from_name,
    dtype_from_tag,
    dtype_name,
    format_tag,
    is_dense,
    is_plain_memory,
    is_quantised,
    is_tagged,
    kind_from_file,
    kind_in_file,
    row_major_bits,
)
from ._header import (
    MAX_INT,
    HeaderEntry,
    canonical_json,
    decode_header,
    decode_header_and_metadata,
    element_count,
    encode_header,
    header_length,
    header_of,
    parse_json,
)
from ._nodes import exactly, named_types, plainer, record_of, shown_path, type_name
from ._tree import decode_tree, encode_tree
from ._values import device_of, is_unicode, path_of

"""Encoding and decoding: dtypes, JSON, safetensors headers, trees, pickles and archives. No files are opened here."""

from __future__ import annotations

from ._crc32 import crc32 as crc32
from ._dtypes import as_integers as as_integers
from ._dtypes import bit_view as bit_view
from ._dtypes import byte_buffer as byte_buffer
from ._dtypes import check_storable as check_storable
from ._dtypes import device_bits as device_bits
from ._dtypes import dtype_from_name as dtype_from_name
from ._dtypes import dtype_from_tag as dtype_from_tag
from ._dtypes import dtype_name as dtype_name
from ._dtypes import format_tag as format_tag
from ._dtypes import is_tagged as is_tagged
from ._dtypes import row_major_bits as row_major_bits
from ._header import Entry as Entry
from ._header import decode_header as decode_header
from ._header import decode_header_metadata as decode_header_metadata
from ._header import encode_header as encode_header
from ._header import header_length as header_length
from ._json import canonical_json as canonical_json
from ._json import parse_json as parse_json
from ._nodes import named_types as named_types
from ._tree import decode_tree as decode_tree
from ._tree import encode_tree as encode_tree
from .archives import TensorPlace as TensorPlace
from .archives import add_record as add_record
from .archives import archive_head as archive_head
from .archives import archive_length as archive_length
from .archives import archive_records as archive_records
from .archives import archive_tail as archive_tail
from .archives import decode_archive as decode_archive
from .archives import encode_archive as encode_archive
from .archives import find_record as find_record
from .archives import tensor_place as tensor_place
from .pickles import Constructor as Constructor
from .pickles import Global as Global
from .pickles import New as New
from .pickles import Persistent as Persistent
from .pickles import Reduced as Reduced
from .pickles import Stub as Stub
from .pickles import inert as inert
from .pickles import read_pickle as read_pickle
from .pickles import write_pickle as write_pickle

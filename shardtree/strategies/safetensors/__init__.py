"""The native format: plain safetensors files, an index in columns, block hashes, and one file that commits."""

from ._index_file import decode_index as decode_index
from ._index_file import encode_index as encode_index
from ._list import list_files as list_files
from ._load import load_common as load_common
from ._load import load_objects as load_objects
from ._load import load_sharded as load_sharded
from ._load import read_index as read_index
from ._metadata import load_metadata as load_metadata
from ._remove import remove_sharded as remove_sharded
from ._save import BACKEND as BACKEND
from ._save import VERSION as VERSION
from ._save import save_common as save_common
from ._save import save_sharded as save_sharded
from ._verify import verify_files as verify_files

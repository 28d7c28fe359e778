"""Hugging Face models: safetensors files of whole tensors, and the index JSON that lists them."""

from ._commit import commit as commit
from ._list import list_files as list_files
from ._load import load_common as load_common
from ._load import load_metadata as load_metadata
from ._load import load_sharded as load_sharded
from ._names import BACKEND as BACKEND
from ._names import VERSION as VERSION
from ._names import recognize as recognize
from ._save import MAX_FILE_BYTES as MAX_FILE_BYTES
from ._save import save_common as save_common
from ._save import save_sharded as save_sharded
from ._save import save_sharded_up_to as save_sharded_up_to
from ._verify import verify_files as verify_files

"""Zarr: Megatron-Core's old checkpoints (version 1, read only), and zarr v3 arrays, ours and others' (version 3)."""

from ._array import StoredArray as StoredArray
from ._common import load_common as load_common
from ._common import save_common as save_common
from ._group import Group as Group
from ._legacy import legacy_group as legacy_group
from ._list import list_files as list_files
from ._load import load_metadata as load_metadata
from ._load import load_objects as load_objects
from ._load import load_sharded as load_sharded
from ._load import read_arrays as read_arrays
from ._load import recognize as recognize
from ._names import array_name as array_name
from ._remove import remove_sharded as remove_sharded
from ._save import save_sharded as save_sharded
from ._verify import verify_files as verify_files

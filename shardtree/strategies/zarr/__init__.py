"""Zarr: Megatron-Core's old checkpoints (version 1, read only), and zarr v3 arrays, ours and others' (version 3)."""

from .._actions import Strategies as Strategies
from .._actions import StrategyAction as StrategyAction
from .._traits import FormatTraits
from ._array import StoredArray as StoredArray
from ._blobs import load_common as load_common
from ._blobs import save_common as save_common
from ._group import Group as Group
from ._layout import array_name as array_name
from ._legacy import explain_legacy as explain_legacy
from ._legacy import legacy_group as legacy_group
from ._legacy import load_legacy_metadata as load_legacy_metadata
from ._legacy import load_legacy_objects as load_legacy_objects
from ._legacy import load_legacy_sharded as load_legacy_sharded
from ._legacy import verify_legacy_files as verify_legacy_files
from ._load import explain as explain
from ._load import load_metadata as load_metadata
from ._load import load_objects as load_objects
from ._load import load_sharded as load_sharded
from ._load import read_arrays as read_arrays
from ._load import recognize as recognize
from ._save import commit as commit
from ._save import save_sharded as save_sharded
from ._verify import list_files as list_files
from ._verify import remove_sharded as remove_sharded
from ._verify import verify_files as verify_files

ROWS: Strategies = {
    (StrategyAction.LOAD_SHARDED, "zarr", 1): load_legacy_sharded,
    (StrategyAction.LOAD_OBJECTS, "zarr", 1): load_legacy_objects,
    (StrategyAction.LOAD_METADATA, "zarr", 1): load_legacy_metadata,
    (StrategyAction.EXPLAIN, "zarr", 1): explain_legacy,
    (StrategyAction.VERIFY, "zarr", 1): verify_legacy_files,
    (StrategyAction.LIST_FILES, "zarr", 1): list_files,
    (StrategyAction.RECOGNIZE, "zarr", 3): recognize,
    (StrategyAction.LOAD_COMMON, "zarr", 3): load_common,
    (StrategyAction.LOAD_SHARDED, "zarr", 3): load_sharded,
    (StrategyAction.LOAD_OBJECTS, "zarr", 3): load_objects,
    (StrategyAction.LOAD_METADATA, "zarr", 3): load_metadata,
    (StrategyAction.EXPLAIN, "zarr", 3): explain,
    (StrategyAction.SAVE_COMMON, "zarr", 3): save_common,
    (StrategyAction.SAVE_SHARDED, "zarr", 3): save_sharded,
    (StrategyAction.SAVE_OBJECTS, "zarr", 3): save_sharded,
    (StrategyAction.REMOVE_SHARDED, "zarr", 3): remove_sharded,
    (StrategyAction.COMMIT, "zarr", 3): commit,
    (StrategyAction.VERIFY, "zarr", 3): verify_files,
    (StrategyAction.LIST_FILES, "zarr", 3): list_files,
    (StrategyAction.DESCRIBE, "zarr", 1): lambda: FormatTraits(decided_by=(".zgroup",), has_manifest=True),
    (StrategyAction.DESCRIBE, "zarr", 3): lambda: FormatTraits(decided_by=("zarr.json", ".zgroup"), has_manifest=True),
}

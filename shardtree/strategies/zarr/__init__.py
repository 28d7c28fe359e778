"""Zarr: Megatron-Core's old checkpoints (version 1, read only), and zarr v3 arrays, ours and others' (version 3)."""

from .._actions import Strategies, StrategyAction
from .._traits import FormatTraits
from ._array import StoredArray
from ._blobs import load_common, save_common
from ._group import Group
from ._layout import array_name
from ._legacy import (
    explain_legacy,
    legacy_group,
    load_legacy_metadata,
    load_legacy_objects,
    load_legacy_sharded,
    verify_legacy_files,
)
from ._load import explain, load_metadata, load_objects, load_sharded, read_arrays, recognize
from ._save import commit, save_sharded
from ._verify import list_files, remove_sharded, verify_files

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

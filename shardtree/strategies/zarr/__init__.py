"""Zarr: Megatron-Core's old checkpoints (version 1, read only), and zarr v3 arrays, ours and others' (version 3)."""

from ...codec import parse_json
from ...storage import Storage
from .._actions import StoredRows, StrategyAction
from .._traits import FormatTraits
from .._values import Fields, fields_of_backend


def recognize(storage: Storage) -> Fields | None:
    """Return the backends of a folder of zarr arrays that another program wrote, None if it isn't one."""
    # A group of ours without metadata.json is a save that wasn't finished, and must not open as another program's.
    if storage.length(".zgroup") is None:
        if storage.length("zarr.json") is None:
            return None
        node = parse_json(storage.read("zarr.json"), storage.where("zarr.json"))
        attributes = node.get("attributes") if isinstance(node, dict) else None
        is_group = isinstance(node, dict) and node.get("node_type") == "group"
        if not is_group or (isinstance(attributes, dict) and "shardtree" in attributes):
            return None
    return fields_of_backend("zarr", 3)


ROWS: StoredRows = {
    (StrategyAction.LOAD_SHARDED, "zarr", 1): "zarr._load:load_sharded",
    (StrategyAction.LOAD_OBJECTS, "zarr", 1): "zarr._load:load_legacy_objects",
    (StrategyAction.LOAD_METADATA, "zarr", 1): "zarr._load:load_metadata",
    (StrategyAction.VERIFY, "zarr", 1): "zarr._verify:verify_files",
    (StrategyAction.LIST_FILES, "zarr", 1): "zarr._group:list_files",
    (StrategyAction.RECOGNIZE, "zarr", 3): recognize,
    (StrategyAction.LOAD_COMMON, "zarr", 3): "zarr._own:load_own_common",
    (StrategyAction.LOAD_SHARDED, "zarr", 3): "zarr._load:load_sharded",
    (StrategyAction.LOAD_OBJECTS, "zarr", 3): "zarr._load:load_objects",
    (StrategyAction.LOAD_METADATA, "zarr", 3): "zarr._load:load_metadata",
    (StrategyAction.SAVE_COMMON, "zarr", 3): "zarr._own:save_common",
    (StrategyAction.SAVE_SHARDED, "zarr", 3): "zarr._save:save_sharded",
    (StrategyAction.REMOVE_SHARDED, "zarr", 3): "zarr._own:remove_sharded",
    (StrategyAction.COMMIT, "zarr", 3): "zarr._save:commit",
    (StrategyAction.VERIFY, "zarr", 3): "zarr._verify:verify_files",
    (StrategyAction.LIST_FILES, "zarr", 3): "zarr._group:list_files",
    (StrategyAction.DESCRIBE, "zarr", 1): lambda: FormatTraits(decided_by=(".zgroup",), has_manifest=True),
    (StrategyAction.DESCRIBE, "zarr", 3): lambda: FormatTraits(decided_by=("zarr.json", ".zgroup"), has_manifest=True),
}

"""Archives of torch.save in data files: Megatron-Core's `torch_dist`, and what torch.distributed.checkpoint writes."""

from ...storage import Storage
from .._actions import StoredRows, StrategyAction
from .._traits import FormatTraits
from .._values import Fields, fields_of_backend


def recognize(storage: Storage) -> Fields | None:
    """Return the backends of a folder that torch.distributed.checkpoint wrote, None if it isn't one."""
    # With a common.pt it is a checkpoint of Megatron-Core without its last file, metadata.json: never finished.
    if storage.length(".metadata") is None or storage.length("common.pt") is not None:
        return None
    return fields_of_backend("dcp", 1)


ROWS: StoredRows = {
    (StrategyAction.SAVE_COMMON, "torch", 1): "torch:save_common",
    (StrategyAction.LOAD_COMMON, "torch", 1): "torch:load_common",
    (StrategyAction.VERIFY, "torch", 1): "torch:verify_common",
    (StrategyAction.LIST_FILES, "torch", 1): "torch:list_files",
    (StrategyAction.LOAD_COMMON, "torch_dist", 1): "torch_dist._common:load_common",
    (StrategyAction.LOAD_SHARDED, "torch_dist", 1): "torch_dist._load:load_sharded",
    (StrategyAction.LOAD_OBJECTS, "torch_dist", 1): "torch_dist._load:load_objects",
    (StrategyAction.LOAD_METADATA, "torch_dist", 1): "torch_dist._load:load_metadata",
    (StrategyAction.PARSE, "torch_dist", 1): "torch_dist._listing:parse",
    (StrategyAction.RESOLVE, "torch_dist", 1): "torch_dist._load:resolve",
    (StrategyAction.SAVE_COMMON, "torch_dist", 1): "torch_dist._save:save_common",
    (StrategyAction.SAVE_SHARDED, "torch_dist", 1): "torch_dist._save:save_sharded",
    (StrategyAction.COMMIT, "torch_dist", 1): "torch_dist._save:commit",
    (StrategyAction.VERIFY, "torch_dist", 1): "torch_dist._verify:verify_files",
    (StrategyAction.LIST_FILES, "torch_dist", 1): "torch_dist._listing:list_files",
    (StrategyAction.RECOGNIZE, "dcp", 1): recognize,
    (StrategyAction.LOAD_COMMON, "dcp", 1): "torch_dist._common:load_dcp_common",
    (StrategyAction.LOAD_SHARDED, "dcp", 1): "torch_dist._load:load_sharded",
    (StrategyAction.LOAD_OBJECTS, "dcp", 1): "torch_dist._load:load_objects",
    (StrategyAction.LOAD_METADATA, "dcp", 1): "torch_dist._load:load_metadata",
    (StrategyAction.PARSE, "dcp", 1): "torch_dist._listing:parse",
    (StrategyAction.SAVE_COMMON, "dcp", 1): "torch_dist._save:save_dcp_common",
    (StrategyAction.SAVE_SHARDED, "dcp", 1): "torch_dist._save:save_dcp_sharded",
    (StrategyAction.COMMIT, "dcp", 1): "torch_dist._save:commit_dcp",
    (StrategyAction.VERIFY, "dcp", 1): "torch_dist._verify:verify_files",
    (StrategyAction.LIST_FILES, "dcp", 1): "torch_dist._listing:list_files",
    (StrategyAction.DESCRIBE, "torch_dist", 1): lambda: FormatTraits(
        decided_by=(".metadata",), cuts_chunks="unchecked", has_manifest=True
    ),
    (StrategyAction.DESCRIBE, "dcp", 1): lambda: FormatTraits(decided_by=(".metadata",), cuts_chunks="unchecked"),
}

"""Archives of torch.save in data files: Megatron-Core's `torch_dist`, and what torch.distributed.checkpoint writes."""

from .._actions import Strategies, StrategyAction
from .._traits import FormatTraits
from ._commit import commit, commit_dcp
from ._common import load_common, load_dcp_common, recognize
from ._listing import DCP, TORCH_DIST, Listing, list_files, read_listing
from ._load import explain, load_metadata, load_objects, load_sharded
from ._metadata_file import INDEX_FILE
from ._save import save_common, save_dcp_common, save_dcp_sharded, save_sharded
from ._verify import verify_files

ROWS: Strategies = {
    (StrategyAction.LOAD_COMMON, "torch_dist", 1): load_common,
    (StrategyAction.LOAD_SHARDED, "torch_dist", 1): load_sharded,
    (StrategyAction.LOAD_OBJECTS, "torch_dist", 1): load_objects,
    (StrategyAction.LOAD_METADATA, "torch_dist", 1): load_metadata,
    (StrategyAction.EXPLAIN, "torch_dist", 1): explain,
    (StrategyAction.SAVE_COMMON, "torch_dist", 1): save_common,
    (StrategyAction.SAVE_SHARDED, "torch_dist", 1): save_sharded,
    (StrategyAction.SAVE_OBJECTS, "torch_dist", 1): save_sharded,
    (StrategyAction.COMMIT, "torch_dist", 1): commit,
    (StrategyAction.VERIFY, "torch_dist", 1): verify_files,
    (StrategyAction.LIST_FILES, "torch_dist", 1): list_files,
    (StrategyAction.RECOGNIZE, "dcp", 1): recognize,
    (StrategyAction.LOAD_COMMON, "dcp", 1): load_dcp_common,
    (StrategyAction.LOAD_SHARDED, "dcp", 1): load_sharded,
    (StrategyAction.LOAD_OBJECTS, "dcp", 1): load_objects,
    (StrategyAction.LOAD_METADATA, "dcp", 1): load_metadata,
    (StrategyAction.EXPLAIN, "dcp", 1): explain,
    (StrategyAction.SAVE_COMMON, "dcp", 1): save_dcp_common,
    (StrategyAction.SAVE_SHARDED, "dcp", 1): save_dcp_sharded,
    (StrategyAction.SAVE_OBJECTS, "dcp", 1): save_dcp_sharded,
    (StrategyAction.COMMIT, "dcp", 1): commit_dcp,
    (StrategyAction.VERIFY, "dcp", 1): verify_files,
    (StrategyAction.LIST_FILES, "dcp", 1): list_files,
    (StrategyAction.DESCRIBE, "torch_dist", 1): lambda: FormatTraits(decided_by=(".metadata",), has_manifest=True),
    (StrategyAction.DESCRIBE, "dcp", 1): lambda: FormatTraits(decided_by=(".metadata",)),
}

"""Hugging Face models: safetensors files of whole tensors, and the index JSON that lists them."""

from .._actions import Strategies, StrategyAction
from .._traits import FormatTraits
from ._listing import list_files, recognize
from ._load import explain, load_common, load_metadata, load_sharded, verify_files
from ._save import MAX_FILE_BYTES, commit, save_common, save_sharded, save_sharded_up_to

ROWS: Strategies = {
    (StrategyAction.RECOGNIZE, "huggingface", 1): recognize,
    (StrategyAction.LOAD_COMMON, "huggingface", 1): load_common,
    (StrategyAction.LOAD_SHARDED, "huggingface", 1): load_sharded,
    (StrategyAction.LOAD_METADATA, "huggingface", 1): load_metadata,
    (StrategyAction.EXPLAIN, "huggingface", 1): explain,
    (StrategyAction.SAVE_COMMON, "huggingface", 1): save_common,
    (StrategyAction.SAVE_SHARDED, "huggingface", 1): save_sharded,
    (StrategyAction.COMMIT, "huggingface", 1): commit,
    (StrategyAction.VERIFY, "huggingface", 1): verify_files,
    (StrategyAction.LIST_FILES, "huggingface", 1): list_files,
    (StrategyAction.DESCRIBE, "huggingface", 1): lambda: FormatTraits(
        decided_by=("*.safetensors", "*.safetensors.index.json"), fills_devices=True, is_guess=True
    ),
}

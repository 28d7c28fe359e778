"""Hugging Face models: safetensors files of whole tensors, and the index JSON that lists them."""

import typing

from .._actions import StoredRows, StrategyAction
from .._traits import FormatTraits
from ._listing import recognize

ROWS: StoredRows = {
    (StrategyAction.RECOGNIZE, "huggingface", 1): recognize,
    (StrategyAction.LOAD_COMMON, "huggingface", 1): "huggingface._load:load_common",
    (StrategyAction.LOAD_SHARDED, "huggingface", 1): "huggingface._load:load_sharded",
    (StrategyAction.LOAD_METADATA, "huggingface", 1): "huggingface._load:load_metadata",
    (StrategyAction.PARSE, "huggingface", 1): "huggingface._load:parse",
    (StrategyAction.SAVE_COMMON, "huggingface", 1): "huggingface._save:save_common",
    (StrategyAction.SAVE_SHARDED, "huggingface", 1): "huggingface._save:save_sharded",
    (StrategyAction.COMMIT, "huggingface", 1): "huggingface._save:commit",
    (StrategyAction.VERIFY, "huggingface", 1): "huggingface._load:verify_files",
    (StrategyAction.LIST_FILES, "huggingface", 1): "huggingface._listing:list_files",
    (StrategyAction.DESCRIBE, "huggingface", 1): lambda: FormatTraits(
        decided_by=("*.safetensors", "*.safetensors.index.json"),
        cuts_chunks="always",
        fills_devices=True,
        is_guess=True,
        shares_files=True,
        writes_common=True,
    ),
}

if typing.TYPE_CHECKING:
    from ._save import MAX_FILE_BYTES as MAX_FILE_BYTES
    from ._save import save_sharded_up_to as save_sharded_up_to
    from ._texts import without_framework as without_framework
else:
    from ..._deferred import later

    __getattr__ = later(
        __name__, {"MAX_FILE_BYTES": "._save", "save_sharded_up_to": "._save", "without_framework": "._texts"}
    )

"""The native format: plain safetensors files, an index in columns, block hashes, and one file that commits."""

from .._actions import Strategies, StrategyAction
from .._traits import FormatTraits
from ..index import load_common, rows_of_saves
from ._write import save_common, save_sharded, verify_files

ROWS: Strategies = {
    **rows_of_saves("safetensors", 1),  # loads, metadata, removal, files: from the index
    (StrategyAction.LOAD_COMMON, "safetensors", 1): load_common,
    (StrategyAction.SAVE_COMMON, "safetensors", 1): save_common,
    (StrategyAction.SAVE_SHARDED, "safetensors", 1): save_sharded,
    (StrategyAction.VERIFY, "safetensors", 1): verify_files,
    (StrategyAction.DESCRIBE, "safetensors", 1): lambda: FormatTraits(
        in_save_folder=True, cuts_chunks="always", fills_devices=True
    ),
}

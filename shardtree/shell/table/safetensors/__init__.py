"""The native format: plain safetensors files, a columnar index, block hashes; metadata.json commits a save."""

from .._actions import StoredRows, StrategyAction
from .._traits import FormatTraits
from ._write import save_common, save_sharded

_READ = "shell.table.safetensors._read"

# Rows that a save doesn't need are import paths, which are imported when a load asks for them.
ROWS: StoredRows = {
    (StrategyAction.LOAD_COMMON, "safetensors", 1): "shell.table.index._rows:load_common",
    (StrategyAction.LOAD_SHARDED, "safetensors", 1): f"{_READ}:load_sharded",
    (StrategyAction.LOAD_OBJECTS, "safetensors", 1): f"{_READ}:load_objects",
    (StrategyAction.LOAD_METADATA, "safetensors", 1): f"{_READ}:load_metadata",
    (StrategyAction.LIST_FILES, "safetensors", 1): f"{_READ}:list_files",
    (StrategyAction.SAVE_COMMON, "safetensors", 1): save_common,
    (StrategyAction.SAVE_SHARDED, "safetensors", 1): save_sharded,
    (StrategyAction.DESCRIBE, "safetensors", 1): lambda: FormatTraits(
        in_save_folder=True, cuts_chunks="always", fills_devices=True
    ),
}

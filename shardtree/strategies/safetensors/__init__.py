"""The native format: plain safetensors files, an index in columns, block hashes, and one file that commits."""

from .._actions import Strategies as Strategies
from .._actions import StrategyAction as StrategyAction
from ._files import list_files as list_files
from ._files import remove_sharded as remove_sharded
from ._files import verify_files as verify_files
from ._load import decode_index as decode_index
from ._load import encode_index as encode_index
from ._load import explain as explain
from ._load import load_common as load_common
from ._load import load_metadata as load_metadata
from ._load import load_objects as load_objects
from ._load import load_sharded as load_sharded
from ._load import read_index as read_index
from ._save import BACKEND as BACKEND
from ._save import save_common as save_common
from ._save import save_sharded as save_sharded

ROWS: Strategies = {
    (StrategyAction.LOAD_COMMON, "safetensors", 1): load_common,
    (StrategyAction.LOAD_SHARDED, "safetensors", 1): load_sharded,
    (StrategyAction.LOAD_OBJECTS, "safetensors", 1): load_objects,
    (StrategyAction.LOAD_METADATA, "safetensors", 1): load_metadata,
    (StrategyAction.EXPLAIN, "safetensors", 1): explain,
    (StrategyAction.SAVE_COMMON, "safetensors", 1): save_common,
    (StrategyAction.SAVE_SHARDED, "safetensors", 1): save_sharded,
    (StrategyAction.SAVE_OBJECTS, "safetensors", 1): save_sharded,
    (StrategyAction.REMOVE_SHARDED, "safetensors", 1): remove_sharded,
    (StrategyAction.VERIFY, "safetensors", 1): verify_files,
    (StrategyAction.LIST_FILES, "safetensors", 1): list_files,
}

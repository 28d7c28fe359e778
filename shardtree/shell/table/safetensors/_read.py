"""The native format's dispatch-table rows for loads, in a module that saves do not import."""

from __future__ import annotations

from .._actions import StrategyAction
from ..index import rows_of_saves

_ROWS = rows_of_saves("safetensors", 1)

load_sharded, load_objects, load_metadata, list_files = (
    _ROWS[StrategyAction(name), "safetensors", 1]
    for name in ("load_sharded", "load_objects", "load_metadata", "list_files")
)

"""Which files a native checkpoint consists of."""

from __future__ import annotations

from .._save_folders import is_save_file
from .._values import Checkpoint
from ..base import StrategyAction, register_default_strategy
from ._save import BACKEND, VERSION


@register_default_strategy(StrategyAction.LIST_FILES, BACKEND, VERSION)
def list_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names of the files of a save's folder that a save writes."""
    folder = checkpoint.fields.get("save_id")
    names = checkpoint.storage.names(folder) if isinstance(folder, str) and folder else ()
    return tuple(name for name in (f"{folder}/{last}" for last in names) if is_save_file(name))

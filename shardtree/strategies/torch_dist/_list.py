"""Which files a checkpoint of archives consists of."""

from __future__ import annotations

import re

from .._manifest import MANIFEST_FILE
from .._values import Checkpoint
from ..base import StrategyAction, register_default_strategy
from ._backends import DCP, INDEX_FILE, TORCH_DIST

_DATA_FILE = re.compile(r"__\d+_\d+\.distcp")


@register_default_strategy(StrategyAction.LIST_FILES, *TORCH_DIST)
@register_default_strategy(StrategyAction.LIST_FILES, *DCP)
def list_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names of the index, the ranks' data files, and Megatron-Core's list of hashes."""
    own = (name for name in checkpoint.storage.names() if _DATA_FILE.fullmatch(name))
    return INDEX_FILE, MANIFEST_FILE, *own

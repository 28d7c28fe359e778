"""Which files a model's weights are."""

from __future__ import annotations

from .._values import Checkpoint
from ..base import StrategyAction, register_default_strategy
from ._listing import read_listing
from ._names import BACKEND, INDEX_FILE, VERSION


@register_default_strategy(StrategyAction.LIST_FILES, BACKEND, VERSION)
def list_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names of the weights' files and of their index; what else a model's folder holds isn't weights.

    Raises:
        CorruptCheckpoint: the index isn't sound.
    """
    listing = read_listing(checkpoint)
    index = INDEX_FILE if "tensor_files" in checkpoint.fields else listing.name
    return tuple({*listing.files, index})

"""What is in a checkpoint of the native format."""

from __future__ import annotations

from collections.abc import Mapping

from ...mapping import ShardedObject, ShardedTensor
from .._values import Checkpoint
from ..base import StrategyAction, register_default_strategy
from ..index import IndexMetadata
from ._load import read_index
from ._save import BACKEND, VERSION


@register_default_strategy(StrategyAction.LOAD_METADATA, BACKEND, VERSION)
def load_metadata(checkpoint: Checkpoint) -> Mapping[str, ShardedTensor | ShardedObject]:
    """Return every stored tensor by key, and object by unique key, whole and without data."""
    return IndexMetadata(read_index(checkpoint))

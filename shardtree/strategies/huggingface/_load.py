"""Loading from a Hugging Face model: only the bytes that are needed, straight into the targets' memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ...errors import UnsupportedValue, error_text
from ...mapping import ShardedObject, ShardedTensor
from ...plans import Prospect
from ...storage import ReadReport
from .._values import Checkpoint
from ..base import StrategyAction, register_default_strategy
from ..index import IndexMetadata, explain_from_index, load_from_index, planned_cost
from ._contents import Contents, read_contents
from ._names import BACKEND, VERSION


@register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, VERSION)
def load_sharded(checkpoint: Checkpoint, shards: Sequence[ShardedTensor]) -> ReadReport:
    """Fill each shard's data, a contiguous CPU tensor, in place, and return what was read.

    Raises:
        KeyMismatch: the model lacks a tensor.
        ShapeError: a tensor is stored with another shape or dtype.
        UnsupportedValue: a tensor has a dtype that torch lacks.
        CorruptCheckpoint: the files aren't sound, or don't fit each other.
    """
    found = read_contents(checkpoint)
    _check_loadable(found, [shard.key for shard in shards])
    return load_from_index(checkpoint, found.index, shards)


@register_default_strategy(StrategyAction.EXPLAIN, BACKEND, VERSION)
def explain(checkpoint: Checkpoint, shards: Sequence[ShardedTensor], cast: bool) -> Prospect:
    """Return what loading shards would come to, from the files' headers alone."""
    found = read_contents(checkpoint)
    cost = partial(planned_cost, checkpoint, found.index)
    return explain_from_index(found.index, shards, cost, cast=cast, refused=found.refused)


@register_default_strategy(StrategyAction.LOAD_METADATA, BACKEND, VERSION)
def load_metadata(checkpoint: Checkpoint) -> Mapping[str, ShardedTensor | ShardedObject]:
    """Return every stored tensor by its name, whole and without data; not those that no shard can be."""
    return IndexMetadata(read_contents(checkpoint).index)


@register_default_strategy(StrategyAction.LOAD_COMMON, BACKEND, VERSION)
def load_common(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the strings that the files keep beside their tensors, as ``__metadata__``; {} where they say nothing."""
    texts = read_contents(checkpoint).texts
    return {"__metadata__": dict(texts)} if texts else {}


def _check_loadable(found: Contents, keys: Sequence[str]) -> None:
    wrong = [f"{key!r}: {found.refused[key]}" for key in sorted({*keys} & found.refused.keys())]
    if wrong:
        fix = "Leave them out of the target."
        raise UnsupportedValue(error_text("load: tensors that torch can't hold", offenders=wrong, fix=fix))

"""Loading tensors and objects from archives of torch.save, and what is in a checkpoint of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ...errors import UnsupportedValue, error_text
from ...layouts import shard_columns
from ...mapping import ShardedObject, ShardedTensor
from ...plans import Prospect
from ...storage import ReadReport
from .._object_checks import check_objects_known
from .._values import Checkpoint
from ..base import StrategyAction, register_default_strategy
from ..index import IndexMetadata, explain_from_index, plan_shards
from ._backends import DCP, TORCH_DIST
from ._decode import decoded
from ._listing import Listing, is_object, read_listing
from ._read import archives_cost, read_archives


@register_default_strategy(StrategyAction.LOAD_METADATA, *TORCH_DIST)
@register_default_strategy(StrategyAction.LOAD_METADATA, *DCP)
def load_metadata(checkpoint: Checkpoint) -> Mapping[str, ShardedTensor | ShardedObject]:
    """Return every stored tensor by key, and object by unique key, whole and without data."""
    return IndexMetadata(read_listing(checkpoint).index)


@register_default_strategy(StrategyAction.LOAD_SHARDED, *TORCH_DIST)
@register_default_strategy(StrategyAction.LOAD_SHARDED, *DCP)
def load_sharded(checkpoint: Checkpoint, shards: Sequence[ShardedTensor]) -> ReadReport:
    """Fill each shard's data, a contiguous CPU tensor, in place, and return what was read.

    Raises:
        KeyMismatch: the checkpoint lacks a key.
        ShapeError: a tensor is stored with another global shape or dtype.
        UnsupportedValue: a tensor is stored in a way that can't be read here.
        CorruptCheckpoint: stored bytes aren't what was saved.
    """
    listing = read_listing(checkpoint)
    _check_known(listing, {shard.key for shard in shards})
    plan = plan_shards(listing.index, shards, shard_columns(shards, checkpoint.world.rank))
    return read_archives(checkpoint, listing, plan, [shard.data for shard in shards])


def _check_known(listing: Listing, keys: set[str]) -> None:
    """Raise if a tensor is stored in a way that can't be read."""
    unknown = [f"{key!r}: {listing.unknown[key]}" for key in sorted(keys & listing.unknown.keys())]
    if unknown:
        fix = "Load them with the program that wrote them, or leave them out of the target."
        raise UnsupportedValue(
            error_text("load: tensors are stored in no way that can be read", offenders=unknown, fix=fix)
        )


@register_default_strategy(StrategyAction.EXPLAIN, *TORCH_DIST)
@register_default_strategy(StrategyAction.EXPLAIN, *DCP)
def explain(checkpoint: Checkpoint, shards: Sequence[ShardedTensor], cast: bool) -> Prospect:
    """Return what loading shards would come to, from `.metadata` alone: archives stay closed."""
    listing = read_listing(checkpoint)
    cost = partial(archives_cost, checkpoint, listing)
    return explain_from_index(listing.index, shards, cost, cast=cast, refused=listing.unknown)


@register_default_strategy(StrategyAction.LOAD_OBJECTS, *TORCH_DIST)
@register_default_strategy(StrategyAction.LOAD_OBJECTS, *DCP)
def load_objects(checkpoint: Checkpoint, objects: Sequence[ShardedObject]) -> list[Any]:
    """Return the data of each sharded object, in order.

    Raises:
        KeyMismatch: the checkpoint lacks one.
        UnsafeFile: one needs code to run, and `allow_pickle` isn't given.
    """
    listing = read_listing(checkpoint)
    wanted = [item.unique_key for item in objects]
    check_objects_known(wanted, [name in listing.values and is_object(name) for name in wanted])
    numbers = [listing.values[name] for name in wanted]
    found = dict(decoded(checkpoint, listing, numbers))
    return [unboxed(found[number]) for number in numbers]


def unboxed(value: Any) -> Any:
    """Return an object's data: Megatron-Core stores it as a list of one, its early versions as it is."""
    return value[0] if type(value) is list and len(value) == 1 else value

"""Open questions of a load: failures that depend on stored values, even if metadata fits the target."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from ..core.mapping import ShardedTensor, given_tensor
from ..core.mapping.memory import tied
from ..core.plans import is_integer, stored_elements
from ..shell.checkpoint.loading import Kinds, LoadRequest, ObjectsFit, Target
from ..transforms import drop_objects
from ._explained import Undecided


def find_undecided(
    request: LoadRequest, target: Target, objects: ObjectsFit, kinds: Kinds, *, is_known: bool
) -> Iterator[Undecided]:
    """Yield the questions about a rank's load that only stored values can answer.

    Args:
        request: Load request.
        target: The rank's target, without keys that aren't stored.
        objects: Fit of the target's objects to the stored ones.
        kinds: Stored dtype and global shape of each tensor, by key.
        is_known: False if the format can't tell whether tensors are stored whole.
    """
    # All of these can fail only while bytes are read, so neither success nor failure can be promised.
    if callable(request.choices[0]):
        yield Undecided("sharded_strategy", "a function of the caller's own loads the shards")
    elif not is_known:
        for key in sorted({shard.key for shard in target.tensors}):
            yield Undecided(key, "the format does not say whether it is stored whole")
    for shard in target.tensors:
        kind = kinds.get(shard.key) if request.cast else None
        if kind is not None and may_overflow(kind.dtype, shard.dtype) and _elements_to_load(shard, kind.global_shape):
            yield Undecided(shard.key, f"whether its values, stored as {kind.dtype}, fit {shard.dtype}")
    for first, *others in tied([(shard, given_tensor(shard)) for shard in target.tensors if target.donate]):
        why = f"whether it is stored with the values of {target.tensors[first].key!r}, whose memory it shares"
        yield from (Undecided(target.tensors[other].key, why) for other in others)
    for item in target.objects:
        if not objects.changes(item):
            yield Undecided(item.key, "whether the object can be decoded")
        elif objects.rules.get(item.key) is not drop_objects:
            yield Undecided(item.key, "whether the rule can handle the objects")


def _elements_to_load(shard: ShardedTensor, stored_shape: tuple[int, ...]) -> int:
    """Return the number of a shard's elements that a load fills: all, or the stored ones if `allow_shape_mismatch`."""
    if shard.allow_shape_mismatch and len(shard.global_shape) == len(stored_shape):
        return stored_elements(shard, stored_shape)
    return prod(shard.data_shape)


def may_overflow(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether both dtypes are integers, and the source has values that don't fit the target.

    Examples:
        >>> may_overflow(torch.int64, torch.uint8), may_overflow(torch.uint8, torch.int64)
        (True, False)
    """
    if source == target or not (is_integer(source) and is_integer(target)):
        return False
    own, other = torch.iinfo(source), torch.iinfo(target)
    return own.min < other.min or own.max > other.max

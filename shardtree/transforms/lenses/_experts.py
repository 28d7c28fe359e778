"""Lenses for experts that lie one behind the other along an axis: stored with an axis of their own, or a key each."""

from __future__ import annotations

from ...errors import ShapeError, error_text
from ...mapping import ShardedTensor
from ._boxes import check_exact, checked_axis, positive
from ._folded import unfolded
from ._lens import Built, Lens, compose_factories
from ._names import check_names
from ._stacked import unstacked
from ._transposed import transposed


def expert_stack(*, experts: int, axis: int = 0) -> Lens:
    """Return the lens of experts that share an axis, stored with an axis of their own in front; always views.

    Experts with a key each are stacked by `stacked_layers`.

    Args:
        experts: how many there are on all ranks; each has as much of the axis.
        axis: along which they lie one behind the other.

    Raises:
        MetadataError: `experts` isn't an integer of at least 1.
        ShapeError: the tensor has no such axis, or they don't divide it.

    Examples:
        >>> import torch
        >>> shard = ShardedTensor.from_rank_offsets("experts.fc1", torch.zeros(5, 6), (1, 1, 2))  # (h, e * f)
        >>> [(part.global_shape, part.global_offset) for part in expert_stack(experts=4, axis=1)(shard).shards]
        [((4, 5, 3), (2, 0, 0))]
    """
    count = positive("expert_stack", "experts", experts)
    return lambda shard: _apart("expert_stack", shard, count, axis)


def expert_keys(part: str, *, experts: int, axis: int = 0) -> Lens:
    """Return the lens of experts that share an axis, stored with a key each; always views.

    Experts that have an axis of their own, the first one, get keys by `unstacked_layers`.

    Args:
        part: what of the key the expert's number is put behind: ``"experts"`` in ``mlp.experts.fc1.weight``.
        experts: how many there are on all ranks; each has as much of the axis.
        axis: along which they lie one behind the other.

    Raises:
        MetadataError: `experts` isn't an integer of at least 1.
        TreeError: the key doesn't have the part.
        ShapeError: the tensor has no such axis, or they don't divide it.

    Examples:
        >>> import torch
        >>> shard = ShardedTensor.from_rank_offsets("experts.fc2", torch.zeros(6, 5), (0, 1, 2))
        >>> [(each.key, each.global_shape) for each in expert_keys("experts", experts=4)(shard).shards]
        [('experts.2.fc2', (3, 5)), ('experts.3.fc2', (3, 5))]
    """
    count = positive("expert_keys", "experts", experts)
    check_names("expert_keys", part, [part], 1)
    return compose_factories(
        lambda shard: _apart("expert_keys", shard, count, axis),
        lambda shard: unstacked("expert_keys", shard, part, shard.prepend_axis_num),
    )


def _apart(doing: str, shard: ShardedTensor, experts: int, axis: int) -> Built:
    check_exact(doing, shard)
    at = checked_axis(doing, shard, axis)
    each, left = divmod(shard.global_shape[at + shard.prepend_axis_num], experts)
    if left:
        found, expected = f"global shape {shard.global_shape}", f"a multiple of {experts} experts along axis {at}"
        raise ShapeError(error_text(f"{doing}: {shard.key!r} can't be divided", found=found, expected=expected))
    rest = [place for place in range(len(shard.local_shape) + 1) if place != at]
    return compose_factories(unfolded(at, (experts, each)), transposed(at, *rest))(shard)

"""What every format checks before it reads: that the checkpoint has what the target asks for, in the same kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches

from ..errors import KeyMismatch, ShapeError, error_text
from ..geometry import Column
from ..layouts import TensorKind
from ..mapping import ShardedTensor


def check_known(keys: Sequence[str], numbers: Sequence[int], stored: Callable[[], Iterable[str]]) -> None:
    """Raise unless every key was found.

    Args:
        keys: what the target asks for.
        numbers: where each was found, -1 for nowhere.
        stored: gives the stored keys, asked for only where near names are to be shown.

    Raises:
        KeyMismatch: names every missing key, and stored ones that look like it.

    Examples:
        >>> check_known(["decoder.bais"], [-1], lambda: ["decoder.bias"])
        Traceback (most recent call last):
        ...
        shardtree.errors.KeyMismatch: load: the checkpoint lacks tensors that the target asks for
          'decoder.bais' (did you mean 'decoder.bias'?)
          Leave them out of the target, or pass a strict mode that tolerates them, as 'log_unexpected'.
    """
    missing = [key for key, number in zip(keys, numbers, strict=True) if number < 0]
    if missing:
        names = list(stored())
        raise KeyMismatch(
            error_text(
                "load: the checkpoint lacks tensors that the target asks for",
                offenders=[repr(key) + _near(key, names) for key in missing[:10]] + [repr(key) for key in missing[10:]],
                fix="Leave them out of the target, or pass a strict mode that tolerates them, as 'log_unexpected'.",
            )
        )


def _near(key: str, names: Sequence[str]) -> str:
    # Comparing with a million names takes minutes; the first hundred thousand are guess enough.
    near = get_close_matches(key, names[:100_000], n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def check_kinds(shards: Sequence[ShardedTensor], stored: Mapping[str, TensorKind]) -> None:
    """Raise unless every shard is of a tensor of the stored global shape and dtype.

    Raises:
        ShapeError: names every key, what is stored and what is asked for.
    """
    wrong: dict[str, str] = {}
    for shard in shards:
        kind = stored[shard.key]
        same_shape = shard.global_shape == kind.global_shape
        tolerated = shard.allow_shape_mismatch and len(shard.global_shape) == len(kind.global_shape)
        if shard.dtype != kind.dtype or not (same_shape or tolerated):
            asked = TensorKind(shard.dtype, shard.global_shape, 0)
            found = TensorKind(kind.dtype, kind.global_shape, 0)
            wrong.setdefault(shard.key, f"{shard.key!r}: checkpoint has {found}, target asks for {asked}")
    if wrong:
        raise ShapeError(
            error_text(
                "load: tensors differ in global shape or dtype",
                offenders=wrong.values(),
                fix="Set allow_shape_mismatch on the shard of a padded tensor; load in the stored dtype, then cast.",
            )
        )


def check_covered(shards: Sequence[ShardedTensor], covered: Column) -> None:
    """Raise unless every element that is asked for is stored.

    Args:
        shards: what is asked for.
        covered: how many elements of each are stored, int64 (shards,).

    Raises:
        ShapeError: some elements aren't stored, and the shard doesn't allow that with `allow_shape_mismatch`.
    """
    wrong = []
    for shard, found in zip(shards, covered.tolist(), strict=True):
        wanted = element_count(shard)
        if found != wanted and not shard.allow_shape_mismatch:
            wrong.append(f"{shard.key!r} at {shard.global_offset}: {found} of {wanted} elements are stored")
    if wrong:
        fix = "The checkpoint was saved without all ranks; load only what is there."
        raise ShapeError(error_text("load: the checkpoint doesn't cover the target", offenders=wrong, fix=fix))


def element_count(shard: ShardedTensor) -> int:
    """Return how many elements a shard holds.

    Examples:
        >>> import torch
        >>> element_count(ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3)))
        6
    """
    if shard.flattened_range is not None:
        return int(shard.flattened_range.stop - shard.flattened_range.start)
    count = 1
    for size in shard.local_shape:
        count *= size
    return count


def misfit(shard: ShardedTensor) -> str:
    """Return how a shard's data differs from what the shard says of it; nothing where it doesn't.

    The constructor has checked that, but tensors can be changed in place after it, and lazy ones replaced.

    Examples:
        >>> import torch
        >>> weight = torch.zeros(2, 3)
        >>> shard = ShardedTensor.from_rank_offsets("w", weight)
        >>> misfit(shard), misfit(shard) if weight.t_() is weight else ""
        ('', "'w' is (2, 3) float32, its data (3, 2) float32")
    """
    if shard.data is None or (shard.data.dtype == shard.dtype and tuple(shard.data.shape) == shard.data_shape):
        return ""
    said, found = TensorKind(shard.dtype, shard.data_shape, 0), TensorKind(shard.data.dtype, tuple(shard.data.shape), 0)
    return f"{shard.key!r} is {said}, its data {found}"

"""What became of everything that a source holds: used, or left out on purpose, or lost, which is an error."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import prod

import numpy as np

from ...errors import IntegrityError, KeyMismatch, error_text
from ...geometry import Column, volumes
from ...layouts import access_problems, shard_columns
from ...lazy import Fetch, LazyTensor
from ...mapping import ShardedObject, ShardedTensor
from ._source import Shard, SourceKey, StoredObject

_Boxes = dict[str, set[tuple[tuple[int, ...], tuple[int, ...], int]]]


def unused_elements(
    source: Mapping[str, Shard],
    tensors: Sequence[ShardedTensor],
    objects: Sequence[ShardedObject],
    reads: Iterable[Fetch],
) -> dict[str, int]:
    """Return how many elements of each tensor of the source don't reach the output, where it is some but not all.

    Args:
        source: what the transform was given.
        tensors: what it gave.
        objects: likewise.
        reads: what it read meanwhile.

    Raises:
        KeyMismatch: a key isn't used at all.
    """
    boxes = _used_boxes(tensors, reads)
    used = {item.data.unique_key for item in objects if isinstance(item.data, StoredObject)} | boxes.keys()
    lost = [repr(key) for key, shard in source.items() if key not in used and _has_elements(shard)]
    if lost:
        fix = "Let the transform pass them on, or name them in leave_out, where * and ? are wildcards."
        raise KeyMismatch(error_text("convert: the output lacks what the source holds", offenders=lost, fix=fix))
    whole = {key: shard for key, shard in source.items() if isinstance(shard, ShardedTensor)}
    counts = {key: prod(shard.global_shape) - _covered(boxes[key]) for key, shard in whole.items() if key in boxes}
    return {key: count for key, count in counts.items() if count > 0}


def check_output(tensors: Sequence[ShardedTensor], objects: Sequence[ShardedObject]) -> None:
    """Raise unless shards make whole tensors of different keys, and objects have different unique keys.

    Raises:
        IntegrityError: names every key, and what is missing or there twice; flat shards are refused too.
    """
    problems = [f"{problem.key!r}: {problem.what}" for problem in access_problems(shard_columns(tensors))]
    names = Counter(item.unique_key for item in objects)
    keys = {shard.key for shard in tensors}
    problems += [f"object {name!r} is there twice" for name, count in names.items() if count > 1]
    problems += [f"{name!r} is both a tensor and an object" for name in names if name in keys]
    problems += [f"{shard.key!r}: a flat range of a box" for shard in tensors if shard.flattened_range is not None]
    if problems:
        fix = "Give each tensor a key of its own, and all of its elements once."
        raise IntegrityError(error_text("convert: the output isn't a whole checkpoint", offenders=problems, fix=fix))


def _has_elements(shard: Shard) -> bool:
    return isinstance(shard, ShardedObject) or prod(shard.global_shape) > 0


def _used_boxes(tensors: Sequence[ShardedTensor], reads: Iterable[Fetch]) -> _Boxes:
    """Return the boxes of each source tensor that are used, each with how many of its elements at most."""
    boxes: _Boxes = defaultdict(set)
    for fetch in reads:
        _add(boxes, fetch, prod(fetch.shape))
    for shard in tensors:
        if isinstance(shard.data, LazyTensor):
            fetches = shard.data.fetches
            # The box around a view can hold more than the view, as that of every second row does.
            most = shard.data.numel() if len(fetches) == 1 else None
            for fetch in fetches:
                _add(boxes, fetch, prod(fetch.shape) if most is None else min(most, prod(fetch.shape)))
    return boxes


def _add(boxes: _Boxes, fetch: Fetch, count: int) -> None:
    if isinstance(fetch.name, SourceKey):
        boxes[fetch.name].add((fetch.offset, fetch.shape, count))


def _covered(boxes: set[tuple[tuple[int, ...], tuple[int, ...], int]]) -> int:
    """Return how many elements lie in some box, as far as their counts allow."""
    listed = sorted({(offset, shape) for offset, shape, _ in boxes})
    begin, shape = (np.array(column, dtype=np.int64).reshape(len(listed), -1) for column in zip(*listed, strict=True))
    return min(_union(begin, begin + shape), sum(count for *_, count in boxes))


def _union(begin: Column, end: Column) -> int:
    """Return the volume of a union of boxes: slab by slab between the edges along the first axis."""
    if len(begin) == 1 or not begin.shape[1]:
        return int(volumes(end[:1] - begin[:1])[0])
    edges = np.unique(np.concatenate([begin[:, 0], end[:, 0]]))
    total, before, volume = 0, b"", 0
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        inside = (begin[:, 0] <= low) & (end[:, 0] > low)
        if inside.tobytes() != before:
            before = inside.tobytes()
            volume = _union(begin[inside, 1:], end[inside, 1:]) if inside.any() else 0
        total += (high - low) * volume
    return total

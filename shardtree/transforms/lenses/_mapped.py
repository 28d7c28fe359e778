"""A lens on one axis: each of its indices is stored somewhere along the same axis of one tensor, or of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ...errors import CheckpointingException, ShapeError, error_text
from ...geometry import Column
from ...mapping import ShardedTensor
from ...trees import as_integers, empty_data, join_data
from ._axis_runs import AxisRuns, Block, stored_blocks
from ._lens import Built, Lens
from ._names import check_names, replaced_part


def mapped_axis(
    doing: str,
    axis: int,
    runs: Callable[[int], AxisRuns],
    *,
    part: str | None = None,
    names: Sequence[str] | None = None,
    fill: float = 0,
) -> Lens:
    """Return the lens that stores each index of an axis where its run says; other axes stay as they are.

    A rank's box becomes the fewest boxes. They are views of it where its rows lie in the same order, else copies.

    Args:
        doing: the lens's name, for errors.
        axis: of the tensor that the model holds; prepended axes don't count.
        runs: from the length of the whole axis to its runs.
        part: what of the key is replaced by the parts' names.
        names: one for each part. Without names there is one part, which keeps the key.
        fill: what a merged tensor has where nothing is stored.

    Raises:
        TreeError: the names aren't sound, or the key has no such part.
        ShapeError: the tensor has no such axis, or its length doesn't fit.

    Examples:
        >>> from shardtree.transforms import grouped_runs
        >>> lens = mapped_axis("halves", 0, lambda n: grouped_runs(n, 2, (n // 4,) * 2), part="w", names=("a", "b"))
        >>> built = lens(ShardedTensor.from_rank_offsets("w", torch.arange(8)))
        >>> {shard.key: shard.data.tolist() for shard in built.shards}
        {'a': [0, 1, 4, 5], 'b': [2, 3, 6, 7]}
        >>> built.merge([shard.data for shard in built.shards])
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    if names is not None or part is not None:
        check_names(doing, part, names, len(list(names or ())) or 1)

    def lens(shard: ShardedTensor) -> Built:
        at = checked_axis(doing, shard, axis)
        place = at + shard.prepend_axis_num
        mapped = _runs_of(doing, shard, runs, shard.global_shape[place])
        keys = _keys(doing, shard.key, len(mapped.sizes), part, names)
        begin = shard.global_offset[place]
        blocks = stored_blocks(mapped, begin, begin + shard.local_shape[at])
        if not shard.global_shape[place]:  # somebody must store that there is nothing
            blocks = [Block(each, 0, np.zeros(0, dtype=np.int64)) for each in range(len(mapped.sizes))]
        shards = tuple(_stored(shard, at, block, keys[block.part], mapped.sizes[block.part]) for block in blocks)
        return Built(shards, lambda parts: _merged(shard, at, blocks, parts, fill))

    return lens


def checked_axis(doing: str, shard: ShardedTensor, axis: int) -> int:
    """Return an axis of the shard's own tensor, counted from the front.

    Raises:
        ShapeError: there is no such axis.
    """
    axes = len(shard.local_shape)
    if not -axes <= axis < axes:
        found, expected = f"axis {axis}", f"one of {axes} axes"
        raise ShapeError(error_text(f"{doing}: {shard.key!r} has no such axis", found=found, expected=expected))
    return axis % axes


def _runs_of(doing: str, shard: ShardedTensor, runs: Callable[[int], AxisRuns], length: int) -> AxisRuns:
    try:
        mapped = runs(length)
    except CheckpointingException as error:
        error.add_note(f"{doing}: of {shard.key!r}, global shape {shard.global_shape}")
        raise
    if mapped.total != length:
        what, found = f"{doing}: runs that don't cover the axis of {shard.key!r}", mapped.total
        raise ShapeError(error_text(what, found=found, expected=f"{length}, of global shape {shard.global_shape}"))
    return mapped


def _keys(doing: str, key: str, count: int, part: str | None, names: Sequence[str] | None) -> list[str]:
    if part is None or names is None:
        if count != 1:
            what, fix = f"{doing}: {count} parts and no names", "Pass part= and names=."
            raise ShapeError(error_text(what, fix=fix))
        return [key]
    check_names(doing, part, names, count)
    return [replaced_part(doing, key, part, name) for name in names]


def _stored(shard: ShardedTensor, at: int, block: Block, key: str, size: int) -> ShardedTensor:
    place = at + shard.prepend_axis_num
    return replace(
        shard,
        key=key,
        data=None if shard.data is None else _taken(shard.data, at, block.places),
        local_shape=_with(shard.local_shape, at, len(block.places)),
        global_shape=_with(shard.global_shape, place, size),
        global_offset=_with(shard.global_offset, place, block.start),
        axis_fragmentations=None,  # the parts of other ranks may have other sizes
    )


def _with(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _taken(data: Any, at: int, index: Column) -> Any:
    """Return the elements at these places of an axis: a view where they follow one another."""
    cuts = [0, *(np.flatnonzero(np.diff(index) != 1) + 1).tolist(), len(index)]
    if len(cuts) <= 2:
        return data.narrow(at, int(index[0]) if len(index) else 0, len(index))
    if isinstance(data, torch.Tensor):
        places = torch.from_numpy(np.ascontiguousarray(index)).to(data.device)
        return as_integers(data).index_select(at, places).view(data.dtype)
    return torch.cat([data.narrow(at, int(index[low]), high - low) for low, high in pairwise(cuts)], dim=at)


def _merged(shard: ShardedTensor, at: int, blocks: Sequence[Block], parts: Sequence[Any], fill: float) -> Any:
    length = shard.local_shape[at]
    held = np.concatenate([*(block.places for block in blocks), np.zeros(0, dtype=np.int64)])
    absent = np.setdiff1d(np.arange(length), held)
    pieces = list(parts)
    if absent.size or not pieces:
        like = pieces[0] if pieces else None
        pieces.append(_filled(_with(shard.local_shape, at, len(absent)), shard, like, fill))
    order = np.empty(length, dtype=np.int64)
    order[np.concatenate([held, absent])] = np.arange(length)
    joined = pieces[0] if len(pieces) == 1 else join_data(torch.cat, pieces, at)
    return _taken(joined, at, order)


def _filled(shape: tuple[int, ...], shard: ShardedTensor, like: Any, fill: float) -> torch.Tensor:
    dtype, device = (shard.dtype, "cpu") if like is None else (like.dtype, like.device)
    filled = empty_data(shape, dtype, device)
    (filled.fill_(fill) if fill else as_integers(filled).zero_())
    return filled

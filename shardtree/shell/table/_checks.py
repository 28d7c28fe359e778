"""Checks that all formats share: a checkpoint has what a target asks for, and masters, rounded, are the weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import torch

from ...core import plans
from ...core.codec import bit_view
from ...core.layouts import TensorKind
from ...core.mapping import ShardedObject, ShardedTensor, lacks_memory
from ...core.offences import offences_text
from ...errors import (
    IntegrityError,
    KeyMismatch,
    MetadataError,
    ShapeError,
    StorageError,
    UnsupportedValue,
    error_text,
)
from ..storage import ReadReport, Storage


def check_taken(untaken: Mapping[str, str], keys: Collection[str], doing: str = "load") -> None:
    """Raise if what is asked for is stored in a way that can't be read.

    Args:
        untaken: why it can't, by key.
        keys: that are asked for.
        doing: what is being done, for the message.

    Raises:
        UnsupportedValue: it does.
    """
    wrong = [f"{key!r}: {untaken[key]}" for key in sorted(untaken.keys() & {*keys})]
    if wrong:
        fix = "Leave them out, or load them with the program that wrote them."
        raise UnsupportedValue(error_text(f"{doing}: tensors that can't be read", offenders=wrong, fix=fix))


def check_fit(problems: Sequence[plans.Misfit]) -> None:
    """Raise if a target doesn't fit the checkpoint, with all problems at once.

    Raises:
        KeyMismatch: something isn't stored.
        UnsupportedValue: all is stored, some in a way that can't be read here.
        ShapeError: something is stored with another global shape or dtype, or not whole; objects of another shape
            have no rule.

    Examples:
        >>> check_fit([Unexpected("decoder.bais", "decoder.bias")])
        Traceback (most recent call last):
        ...
        shardtree.errors.KeyMismatch: load: the target doesn't fit the checkpoint
          'decoder.bais': not stored (did you mean 'decoder.bias'?)
          Leave out what isn't stored, or pass a strict mode that does, as 'log_unexpected'.
          `explain` lists all, without reading.
    """
    if not problems:
        return
    # All problems in one error: a target with several is mended at once, not load by load.
    heading, last = "load: the target doesn't fit the checkpoint", "`explain` lists all, without reading."
    text = offences_text(heading, plans.with_prefixes(problems), last)
    unexpected = [problem for problem in problems if isinstance(problem, plans.Unexpected)]
    if unexpected:
        error = KeyMismatch(text)
        error.unexpected = tuple(sorted({problem.key for problem in unexpected}))
        raise error
    if all(isinstance(problem, plans.Refusal) for problem in problems):
        raise UnsupportedValue(text)
    raise ShapeError(text)


def misfit(shard: ShardedTensor) -> str:
    """Return how a shard's data differs from the shard's dtype and shape; an empty text if it doesn't.

    The constructor has checked that, but tensors can be changed in place after it, and lazy ones replaced.

    Examples:
        >>> import torch
        >>> weight = torch.zeros(2, 3)
        >>> shard = ShardedTensor.from_rank_offsets("w", weight)
        >>> misfit(shard), misfit(shard) if weight.t_() is weight else ""
        ('', "'w' is (2, 3) float32, its data (3, 2) float32")
    """
    data = shard.data
    if data is None or (data.dtype == shard.dtype and data.shape == shard.data_shape):
        return f"the storage of {shard.key!r} is freed" if lacks_memory(data) else ""
    shard_kind = TensorKind(shard.dtype, shard.data_shape, 0)
    data_kind = TensorKind(shard.data.dtype, tuple(shard.data.shape), 0)
    return f"{shard.key!r} is {shard_kind}, its data {data_kind}"


# Checks of sharded objects: that those asked for are stored, and that each was written once


def check_objects_known(unique_keys: Sequence[str], are_there: Sequence[bool]) -> None:
    """Raise unless every object that is asked for was found.

    Args:
        unique_keys: of the objects.
        found: whether each is stored.

    Raises:
        KeyMismatch: names every missing one.

    Examples:
        >>> check_objects_known(["rng/shard_0_1"], [True])
    """
    check_fit(
        [
            plans.Unexpected(key, is_object=True)
            for key, is_there in zip(unique_keys, are_there, strict=True)
            if not is_there
        ]
    )


def is_object(name: str) -> bool:
    """Return whether a name is the unique key of a sharded object.

    Examples:
        >>> is_object("rng_state/shard_0.1_1.2"), is_object("optimizer.step")
        (True, False)
    """
    try:
        ShardedObject.empty_from_unique_key(name)
    except MetadataError:
        return False
    return True


def old_unique_key(item: ShardedObject) -> str:
    """Return the name that old releases of Megatron-Core gave an object, without what follows its last dot.

    Examples:
        >>> old_unique_key(ShardedObject("rng", None, (2, 4), (1, 3)))
        'rng/shard_1.3_2'
    """
    folder, slash, last = item.unique_key.rpartition("/")
    return f"{folder}{slash}{last.rpartition('.')[0] or last}"


def check_objects_written(unique_keys: Sequence[str], tensor_keys: Collection[str]) -> None:
    """Raise unless every object was written once, and no tensor is named like one.

    Args:
        unique_keys: of the objects that all ranks wrote.
        tensor_keys: of the tensors.

    Raises:
        IntegrityError: names those that were written twice, or else the tensors.

    Examples:
        >>> check_objects_written(["rng/shard_0_2", "rng/shard_1_2"], {"weight"})
    """
    twice = [repr(one) for one, other in pairwise(sorted(unique_keys)) if one == other]
    if twice:
        fix = "Give replicas different replica_ids."
        raise IntegrityError(
            error_text("save: objects written by more than one main replica", offenders=twice, fix=fix)
        )
    clashes = sorted(set(tensor_keys).intersection(unique_keys))
    if clashes:
        fix = "Rename the tensors: '<key>/shard_<offset>_<shape>' is how an object is named."
        raise IntegrityError(error_text("save: tensors named like objects", offenders=map(repr, clashes), fix=fix))


def check_seen(storage: Storage, files: Iterable[tuple[str, int]], writer: str) -> None:
    """Raise unless rank 0 sees files as they were written, before any checkpoint names them.

    Args:
        storage: the folder, as rank 0 sees it.
        files: name and length in bytes of each.
        writer: who wrote them, for messages.

    Raises:
        StorageError: one isn't there, or has another length.
    """
    # Each node may have mounted a disk of its own at the same path, or another save's clean-up removed a file.
    for name, length in files:
        length_here = storage.length(name)
        if length_here != length:
            what = f"save: rank 0 doesn't see {storage.where(name)!r} as {writer} wrote it"
            fix = "Every rank must see the same folder; use shared storage."
            raise StorageError(error_text(what, found=length_here, expected=f"{length} bytes", fix=fix))


def checked_data(shard: ShardedTensor) -> Any:
    """Return a shard's data, which may be lazy.

    Raises:
        ShapeError: it was changed since the save began.
    """
    if difference := misfit(shard):
        raise ShapeError(error_text("save: a tensor was changed while it waited to be written", found=difference))
    return shard.data


_PIECE_ELEMENTS = 4 * 1024 * 1024
"""Masters are read into memory of their own, at most so many elements at a time."""

Read = Callable[[Sequence[ShardedTensor]], ReadReport]
"""Fills the shards' data in place, and returns what was read."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What shows that a state's bytes belong to its parameter.

    Attributes:
        master: the key of the parameter's master, whose bytes lie in the same files as the state's.
        weight: the key of the parameter; the master, rounded, is equal to it.
    """

    master: str
    weight: str


def first_difference(
    read: Read, pair: Comparison, box: ShardedTensor, dtype: torch.dtype
) -> tuple[tuple[int, ...] | None, ReadReport]:
    """Return where a master, rounded, first differs from its weight; None if nowhere.

    Args:
        read: reads stored tensors.
        pair: the master and the weight.
        box: a part of the tensor, as a shard of either.
        dtype: of the weight.

    Returns:
        The indices in the global tensor, and what was read.
    """
    report = ReadReport()
    for piece in pieces_of(replace(box, data=None)):
        master = replace(piece, key=pair.master, dtype=torch.float32, data=memory_of(piece))
        weight = replace(piece, key=pair.weight, dtype=dtype, data=memory_of(piece, dtype))
        report += read([master, weight])
        element = _first_unlike(master.data, weight.data)
        if element is not None:
            return _place(piece, element), report
    return None, report


def _first_unlike(master: torch.Tensor, weight: torch.Tensor) -> int | None:
    """Return the number of the first element where a master, rounded, isn't the weight; None if there is none."""
    if master.dtype == weight.dtype:  # a copy that nothing has rounded: bit for bit
        item = master.element_size()
        unlike = (bit_view(master) != bit_view(weight)).view(-1, item).any(dim=1)
    else:
        cast = master.to(weight.dtype)
        unlike = ((cast != weight) & ~(cast.isnan() & weight.isnan())).flatten()
    return int(unlike.nonzero()[0]) if bool(unlike.any()) else None


def _place(shard: ShardedTensor, element: int) -> tuple[int, ...]:
    """Return the indices in the global tensor of a shard's element."""
    if shard.flattened_range is not None:
        element += shard.flattened_range.start
    inside = [int(at) for at in np.unravel_index(element, shard.local_shape)] if shard.local_shape else []
    inside = [0] * shard.prepend_axis_num + inside
    return tuple(begin + at for begin, at in zip(shard.global_offset, inside, strict=True))


def memory_of(shard: ShardedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return new memory for a shard's elements."""
    return torch.empty(shard.data_shape, dtype=dtype, device="cpu")


def pieces_of(shard: ShardedTensor) -> Iterator[ShardedTensor]:
    """Yield a shard in pieces of a few million elements, whose data are contiguous views of its data.

    A padded tensor's shard is one piece.
    """
    if shard.allow_shape_mismatch or prod(shard.data_shape) <= _PIECE_ELEMENTS:
        yield shard
        return
    if shard.flattened_range is not None:
        start = shard.flattened_range.start
        for at in range(0, shard.data_shape[0], _PIECE_ELEMENTS):
            stop = min(at + _PIECE_ELEMENTS, shard.data_shape[0])
            yield replace(
                shard,
                data=None if shard.data is None else shard.data[at:stop],
                flattened_range=slice(start + at, start + stop),
            )
        return
    axis = next(axis for axis, length in enumerate(shard.local_shape) if length > 1)
    step = max(1, _PIECE_ELEMENTS // prod(shard.local_shape[axis + 1 :]))
    for at in range(0, shard.local_shape[axis], step):
        yield from pieces_of(_part(shard, axis, at, min(step, shard.local_shape[axis] - at)))


def _part(shard: ShardedTensor, axis: int, start: int, length: int) -> ShardedTensor:
    """Return a part of a box along a local axis: of the same global tensor, where `narrow` makes a smaller one."""
    offset, shape = list(shard.global_offset), list(shard.local_shape)
    offset[shard.prepend_axis_num + axis] += start
    shape[axis] = length
    data = None if shard.data is None else shard.data.narrow(axis, start, length)
    box, begin = tuple(shape), tuple(offset)
    return replace(shard, data=data, local_shape=box, global_offset=begin, axis_fragmentations=None)

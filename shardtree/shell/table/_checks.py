"""Checks that all formats share: a checkpoint has what a target asks for, and a save writes each object once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import Any

from ...core import plans
from ...core.layouts import TensorKind
from ...core.mapping import ShardedObject, ShardedTensor, lacks_memory
from ...core.offences import offences_text
from ...errors import (
    IntegrityError,
    KeyMismatch,
    ShapeError,
    StorageError,
    UnsupportedValue,
    error_text,
)
from ..storage import Storage


def check_fit(problems: Sequence[plans.Misfit]) -> None:
    """Raise an error with all problems if a target doesn't fit the checkpoint.

    Raises:
        KeyMismatch: a key isn't stored.
        UnsupportedValue: everything is stored, but some values can't be read here.
        ShapeError: a tensor is stored with another global shape or dtype, or with gaps; or an array of objects has
            another shape, and no rule converts it.

    Examples:
        >>> check_fit([plans.Unexpected("decoder.bais", "decoder.bias")])
        Traceback (most recent call last):
        ...
        shardtree.errors.KeyMismatch: load: the target does not fit the checkpoint
          'decoder.bais': not stored (did you mean 'decoder.bias'?)
          Take keys that are not stored out of the target, or pass a lenient strict= such as 'log_unexpected'.
          `explain(...).problems` lists all, without a load.
    """
    if not problems:
        return
    # The error names all problems, so that a target with several can be mended at once.
    heading, last = "load: the target does not fit the checkpoint", "`explain(...).problems` lists all, without a load."
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
    """Return the difference between a shard's data and its dtype and shape, as text; empty if there is none.

    The constructor has checked both, but tensors can be changed in place later, and lazy tensors replaced.

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


# Checks of sharded objects: each requested one is stored, and each is written once.


def check_objects_known(unique_keys: Sequence[str], are_there: Sequence[bool]) -> None:
    """Raise if a requested object isn't stored.

    Args:
        unique_keys: Unique keys of the requested objects.
        are_there: Whether each object is stored.

    Raises:
        KeyMismatch: an object isn't stored; the error names all missing objects.

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


def old_unique_key(item: ShardedObject) -> str:
    """Return an object's name in old releases of Megatron-Core: its unique key without the last dot and what follows.

    Examples:
        >>> old_unique_key(ShardedObject("rng", None, (2, 4), (1, 3)))
        'rng/shard_1.3_2'
    """
    folder, slash, last = item.unique_key.rpartition("/")
    return f"{folder}{slash}{last.rpartition('.')[0] or last}"


def check_objects_written(unique_keys: Sequence[str], tensor_keys: Collection[str]) -> None:
    """Raise if an object was written twice, or a tensor is named like an object.

    Args:
        unique_keys: Unique keys of the objects that all ranks wrote.
        tensor_keys: Keys of the tensors.

    Raises:
        IntegrityError: an object was written twice, or a tensor has the name of an object.

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
        fix = "Rename the tensors: names like '<key>/shard_<offset>_<shape>' are reserved for objects."
        raise IntegrityError(error_text("save: tensors named like objects", offenders=map(repr, clashes), fix=fix))


def check_seen(storage: Storage, files: Iterable[tuple[str, int]], writer: str) -> None:
    """Raise if rank 0 doesn't see files as other ranks wrote them; call this before an index names the files.

    Args:
        storage: Storage of the folder, as rank 0 sees it.
        files: Name and length in bytes of each file.
        writer: Rank that wrote the files, for messages.

    Raises:
        StorageError: a file is missing, or has another length.
    """
    # Each node may have mounted its own disk at the path, or another save's clean-up may have removed a file.
    for name, length in files:
        if (length_here := storage.length(name)) != length:
            found = "no such file" if length_here is None else f"{length_here} bytes"
            heading = f"save: rank 0 does not see {storage.where(name)!r} as {writer} wrote it"
            fix = "Every rank must see the same folder; use shared storage."
            raise StorageError(error_text(heading, found=found, expected=f"{length} bytes", fix=fix))


def checked_data(shard: ShardedTensor) -> Any:
    """Return a shard's data, which may be lazy.

    Raises:
        ShapeError: the data was changed since the save began.
    """
    if difference := misfit(shard):
        raise ShapeError(error_text(f"save: {shard.key!r} was changed before the save wrote it", found=difference))
    return shard.data

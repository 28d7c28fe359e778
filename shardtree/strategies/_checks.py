"""Checks that all formats share: that a checkpoint has what a target asks for, in the same kind."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeGuard

from ..errors import IntegrityError, KeyMismatch, ShapeError, UnsupportedValue, error_text
from ..layouts import TensorKind
from ..mapping import ShardedObject, ShardedTensor, lacks_memory
from ..objects import OBJECT_RULES, ShapeChange
from ..plans import (
    Gap,
    Misfit,
    Mismatch,
    Refusal,
    Unexpected,
    convertible,
    misfit_lines,
    prefix_difference,
    wants_names,
)


def check_taken(untaken: Mapping[str, str], keys: Collection[str]) -> None:
    """Raise if a target asks for what is stored in a way that can't be read.

    Args:
        untaken: why it can't, by key.
        keys: that are asked for.

    Raises:
        UnsupportedValue: it does.
    """
    wrong = [f"{key!r}: {untaken[key]}" for key in sorted(untaken.keys() & {*keys})]
    if wrong:
        fix = "Leave them out of the target, or load them with the program that wrote them."
        raise UnsupportedValue(error_text("load: tensors that can't be read", offenders=wrong, fix=fix))


def check_fit(problems: Sequence[Misfit]) -> None:
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
          not stored: 'decoder.bais' (did you mean 'decoder.bias'?)
          Leave out what isn't stored, or pass a strict mode that does, as 'log_unexpected'.
          `explain` lists all, without reading.
    """
    if not problems:
        return
    # All problems in one error: a target with several is mended at once, not load by load.
    unexpected = [problem for problem in problems if isinstance(problem, Unexpected)]
    prefix = prefix_difference(unexpected)
    fixes = [] if prefix is None else [prefix.fix]
    fixes += [fix for concerns, fix in _FIXES if any(map(concerns, problems))]
    lines = misfit_lines(problems)
    text = error_text("load: the target doesn't fit the checkpoint", offenders=lines, fix="\n  ".join([*fixes, _LAST]))
    if unexpected:
        error = KeyMismatch(text)
        error.unexpected = tuple(sorted({problem.key for problem in unexpected}))
        raise error
    if all(isinstance(problem, Refusal) for problem in problems):
        raise UnsupportedValue(text)
    raise ShapeError(text)


def _is_object(problem: Misfit) -> bool:
    return isinstance(problem, Unexpected) and problem.is_object


def _is_unknown(problem: Misfit) -> bool:
    return isinstance(problem, Unexpected) and not problem.is_object and problem.path is None


def _wants_names(problem: Misfit) -> bool:
    return isinstance(problem, Unexpected) and wants_names(problem)


def _is_in_common(problem: Misfit) -> bool:
    return isinstance(problem, Unexpected) and problem.path is not None


def _has_other_axes(problem: Misfit) -> bool:
    return isinstance(problem, Mismatch) and len(problem.stored.global_shape) != len(problem.asked.global_shape)


def _has_another_shape(problem: Misfit) -> bool:
    same = isinstance(problem, Mismatch) and problem.stored.global_shape == problem.asked.global_shape
    return isinstance(problem, Mismatch) and not same and not _has_other_axes(problem)


def _could_be_converted(problem: Misfit) -> bool:
    return _has_another_dtype(problem) and not problem.cast and not _must_stay(problem)


def _must_stay(problem: Misfit) -> bool:
    return _has_another_dtype(problem) and not convertible(problem.stored.dtype, problem.asked.dtype)


def _has_another_dtype(problem: Misfit) -> TypeGuard[Mismatch]:
    return isinstance(problem, Mismatch) and problem.stored.dtype != problem.asked.dtype


def _is_reshaped(problem: Misfit) -> bool:
    return isinstance(problem, ShapeChange)


def _is_gap(problem: Misfit) -> bool:
    return isinstance(problem, Gap)


IN_COMMON = "Leave plain tensors of the common state out of the target: `load` returns them where they are."
"""What to do about a tensor that is asked for as shards and stored as a plain one."""

_FIXES: Sequence[tuple[Callable[[Misfit], bool], str]] = (
    (_is_unknown, "Leave out what isn't stored, or pass a strict mode that does, as 'log_unexpected'."),
    (
        _wants_names,
        "States stand under numbers there: pass LoadOptions(parameter_names=[...]), in the optimizer's order.",
    ),
    (_is_in_common, IN_COMMON),
    (_is_object, "Ask for objects in the grid that was saved, or leave them out."),
    (_is_reshaped, f"Name a rule in object_rules: {OBJECT_RULES}."),
    (_has_other_axes, "Load with as many axes as are stored, and reshape what is loaded."),
    (_has_another_shape, "Set allow_shape_mismatch on the shard of a padded tensor."),
    (_could_be_converted, "Pass cast=True to convert the stored dtype."),
    (_must_stay, "Load in the stored dtype."),
    (_is_gap, "The checkpoint was saved without all ranks; load only what is there."),
)
_LAST = "`explain` lists all, without reading."


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
    said, found = TensorKind(shard.dtype, shard.data_shape, 0), TensorKind(shard.data.dtype, tuple(shard.data.shape), 0)
    return f"{shard.key!r} is {said}, its data {found}"


# Checks of sharded objects: that those asked for are stored, and that each was written once


def check_objects_known(unique_keys: Sequence[str], found: Sequence[bool]) -> None:
    """Raise unless every object that is asked for was found.

    Args:
        unique_keys: of the objects.
        found: whether each is stored.

    Raises:
        KeyMismatch: names every missing one.

    Examples:
        >>> check_objects_known(["rng/shard_0_1"], [True])
    """
    check_fit([Unexpected(key, is_object=True) for key, known in zip(unique_keys, found, strict=True) if not known])


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
    shared = sorted(set(tensor_keys).intersection(unique_keys))
    if shared:
        fix = "Rename the tensors: '<key>/shard_<offset>_<shape>' is how an object is named."
        raise IntegrityError(error_text("save: tensors named like objects", offenders=map(repr, shared), fix=fix))


def checked_data(shard: ShardedTensor) -> Any:
    """Return a shard's data, which may be lazy.

    Raises:
        ShapeError: it was changed since the save began.
    """
    if found := misfit(shard):
        raise ShapeError(error_text("save: a tensor was changed while it waited to be written", found=found))
    return shard.data

"""What every format checks of sharded objects: that those asked for are stored, and that each was written once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from ..errors import IntegrityError, error_text
from ..mapping import ShardedObject
from ..plans import Unexpected
from ._checks import check_fit


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
    """Return the name that old releases of Megatron-Core gave an object: what followed the last dot was lost.

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

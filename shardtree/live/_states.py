"""What goes along with the tensors: the common state that the sources agree about, and sharded objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ..codec import row_major_bits
from ..layouts.objects import ObjectRule, reshard_objects
from ..mapping import ShardedObject
from ..plans.moving import agreed_common
from ..trees import map_shards
from ..world import World, agree, gather, on_one_rank
from ._describe import Description
from ._ends import DOING, Ends

Rules = Mapping[str, ObjectRule] | None


def shared_common(world: World, said: Sequence[Description], common: Any) -> Any:
    """Return the sources' common state, on every rank the first one's; collective. It is sent once.

    Raises:
        IntegrityError: the sources' common states differ.
    """
    givers = [rank for rank, each in enumerate(said) if each.common is not None]
    if len({said[rank].common for rank in givers}) > 1:
        # Hashes may differ where values are equal: of what was pickled, say.
        commons = gather(world, "redistribute: compare common states", lambda: _portable(common))
        agree(world, "redistribute: common state", partial(_check_alike, commons))
    if not givers or world.size == 1:
        return common
    sent = on_one_rank(world, "redistribute: pass on the common state", lambda: _portable(common), rank=givers[0])
    return common if world.rank == givers[0] else _restored(sent)


def _check_alike(commons: Sequence[Any]) -> None:
    agreed_common({rank: _restored(common) for rank, common in enumerate(commons)}, DOING)


@dataclass(frozen=True, slots=True, eq=False)
class _Bits:
    """A tensor on its way: not every dtype of torch's can be pickled, and a view would bring its whole storage."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    bits: np.ndarray[tuple[int], np.dtype[np.uint8]]


def _portable(common: Any) -> Any:
    return map_shards(_as_bits, common)


def _as_bits(leaf: Any) -> Any:
    if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.is_quantized:
        return leaf
    return _Bits(leaf.dtype, tuple(leaf.shape), row_major_bits(leaf).numpy())


def _restored(common: Any) -> Any:
    return map_shards(_as_tensor, common)


def _as_tensor(leaf: Any) -> Any:
    if not isinstance(leaf, _Bits):
        return leaf
    return torch.from_numpy(leaf.bits).view(leaf.dtype).view(leaf.shape)


def resharded_objects(world: World, said: Sequence[Description], ends: Ends, rules: Rules) -> list[ShardedObject]:
    """Return this rank's wanted objects with their data; collective. Nothing is sent where nobody wants one.

    Raises:
        KeyMismatch: an object isn't there.
        IntegrityError: objects have another shape and no rule.
    """
    if not any(each.wants_objects for each in said):
        return []
    parts = gather(world, "redistribute: gather objects", lambda: _with_data(ends.given.objects, _portable))
    return agree(world, "redistribute: reshard objects", partial(_resharded, parts, ends.objects, rules))


def _resharded(
    parts: Sequence[Sequence[ShardedObject]], targets: Sequence[ShardedObject], rules: Rules
) -> list[ShardedObject]:
    return reshard_objects(_with_data((item for part in parts for item in part), _restored), targets, rules)


def _with_data(objects: Iterable[ShardedObject], change: Callable[[Any], Any]) -> list[ShardedObject]:
    return [replace(item, data=change(item.data)) for item in objects]

"""Values that exist once for each parameter: numbers such as Adam's `step`, and tensors that all its shards share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from ..core.mapping import ReplicaId, ShardedObject, ShardedTensor, ShardedTensorFactory
from ..core.trees import build_factories, diff, leaves_with_paths
from ..errors import ShapeError, error_text
from ._state_dict import ShardedParam, check_param

# The shard with the parameter's first element holds the main replica of such values.


def first_element(shard: ShardedTensor) -> int:
    """Return the row-major index, in the global tensor, of a shard's first element.

    Exactly one shard of each tensor, and its replicas, get 0. Prepended axes don't count: each index along them stands
    for a tensor of its own. A shard without elements gets an index beyond the last element. In a tensor without
    elements, 0 goes to the shard that begins at index 0 and whose length is 0 only along axes of global length 0.

    Args:
        shard: A box or a flat range of a box; the grid may be irregular.

    Examples:
        >>> import torch
        >>> [first_element(ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, n, 4))) for n in range(4)]
        [0, 6, 12, 18]
        >>> flat = ShardedTensor.from_rank_offsets_flat("w", torch.zeros(3), (2, 4), flattened_range=slice(5, 8))
        >>> first_element(flat)
        5
    """
    front = shard.prepend_axis_num
    whole, offset, box = shard.global_shape[front:], shard.global_offset[front:], shard.local_shape
    start, stop = (0, prod(box)) if (flat := shard.flattened_range) is None else (flat.start, flat.stop)
    if start < stop:
        index = [low + inside for low, inside in zip(offset, _index(start, box), strict=True)]
        # A padded shard may reach beyond a global axis of length 0.
        return max(_number(index, whole), int(any(index)))
    begins = not any(offset) and all(size > 0 or length == 0 for size, length in zip(box, whole, strict=True))
    return 0 if prod(whole) == 0 and begins and start == 0 else max(prod(whole), 1)


def _index(number: int, shape: tuple[int, ...]) -> list[int]:
    """Return an element's index along each axis of a box, from its row-major index; the inverse of `_number`."""
    index = []
    for size in reversed(shape):
        number, place = divmod(number, size)
        index.append(place)
    return index[::-1]


def _number(index: list[int], shape: tuple[int, ...]) -> int:
    number = 0
    for place, size in zip(index, shape, strict=True):
        number = number * size + place
    return number


def per_parameter(param: ShardedParam, prefix: str, value: Any) -> ShardedTensor | ShardedObject | ShardedTensorFactory:
    """Return a leaf that stores a value once for a whole parameter, such as Adam's step count.

    The value's main replica is on the rank that has the main replica of the parameter's first element. Along prepended
    axes, each index is a parameter of its own, with its own value. If a factory builds several keys, the value is
    stored under each of them, so that a model in which they are separate parameters can load it. A load into the
    factory raises an error if these stored values differ.

    Args:
        param: Shard of the parameter on this rank, or its factory.
        prefix: Prefix of the parameter's key, joined by a dot.
        value: A tensor of any shape, which becomes a ShardedTensor; anything else becomes a ShardedObject.

    Examples:
        >>> right = ShardedTensor.from_rank_offsets("w", torch.zeros(4), (0, 1, 2))
        >>> step = per_parameter(right, "optimizer.state.step", torch.tensor(3.0))
        >>> step.key, step.global_shape, step.replica_id
        ('optimizer.state.step.w', (), (4, 0))
    """
    check_param("per_parameter", param)
    key = f"{prefix}.{param.key}"
    if isinstance(param, ShardedTensor):
        return _value_leaf(replace(param, key=key, data=None), value)
    factory_value = _FactoryValue(param, _kind(value))
    return ShardedTensorFactory(key, value, factory_value.build, factory_value.merge, param.replica_id)


@dataclass(frozen=True, slots=True, eq=False)
class _FactoryValue:
    """The `build` and `merge` of a factory for a value that exists once for a parameter, such as Adam's `step`.

    Attributes:
        param: Factory that builds the parameter's own shards.
        kind: A meta tensor with the dtype and shape of the value; None if the value isn't a tensor.
    """

    param: ShardedTensorFactory
    kind: torch.Tensor | None

    def build(self, key: str, data: Any, replica_id: ReplicaId, flattened_range: slice | None) -> list[Any]:
        value = self.kind if data is None and self.kind is not None else data
        shards = built_shards(replace(self.param, key=key, replica_id=replica_id))
        # Each key gets a value: where a factory's parts are parameters of their own, each finds its value.
        # A factory may build nothing on this rank: its leaf is never the main replica.
        nothing = ShardedTensor(key, None, torch.uint8, (0,), (1,), (0,), None)
        leaves = [_value_leaf(shard, value) for shard in _first_of_each(shards) or [nothing]]
        return [leaf.without_data() for leaf in leaves] if data is None else leaves

    def merge(self, values: Sequence[Any]) -> Any:
        differ = [str(value)[:80] for value in values[1:] if diff(values[0], value)]
        if differ:
            heading = f"the tensors stored for {self.param.key!r} differ in a state that exists once, such as `step`"
            found, expected = ", ".join([str(values[0])[:80], *differ]), "equal values"
            fix = "Load these tensors as separate parameters, each with its own value."
            raise ShapeError(error_text(heading, found=found, expected=expected, fix=fix))
        return values[0]


def built_shards(param: ShardedParam) -> list[ShardedTensor]:
    """Return the stored shards of a parameter: itself, or the shards that its factory builds.

    Examples:
        >>> [shard.key for shard in built_shards(ShardedTensor.from_rank_offsets("w", torch.zeros(2)))]
        ['w']
    """
    tree, _ = build_factories([param], is_target=True)  # only the positions of these shards are used
    return [leaf for _, leaf in leaves_with_paths(tree) if isinstance(leaf, ShardedTensor)]


def _first_of_each(shards: Iterable[ShardedTensor]) -> list[ShardedTensor]:
    """Return one shard for each key and each index along prepended axes: the one with the lowest `first_element`."""
    found: dict[Any, ShardedTensor] = {}
    for shard in sorted(shards, key=first_element):
        found.setdefault((shard.key, shard.global_offset[: shard.prepend_axis_num]), shard)
    return [found[place] for place in sorted(found)]


def _value_leaf(shard: ShardedTensor, value: Any) -> ShardedTensor | ShardedObject:
    """Return the leaf that stores a value once for a parameter: a ShardedTensor for a tensor, else a ShardedObject.

    The leaf can be the main replica only if `shard` has the parameter's first element.
    """
    front = shard.prepend_axis_num
    count, place = shard.global_shape[:front], shard.global_offset[:front]
    replica = (first_element(shard), *([own] if isinstance(own := shard.replica_id, int) else own))
    # It is an object, so that an int is loaded as an int.
    if not isinstance(value, torch.Tensor):
        return ShardedObject(shard.key, value, count or (1,), place or (0,), replica)
    shape = tuple(value.shape)
    zeros = (0,) * len(shape)
    return ShardedTensor(
        shard.key, value, value.dtype, shape, (*count, *shape), (*place, *zeros), None, replica, prepend_axis_num=front
    )


def _kind(value: Any) -> torch.Tensor | None:
    """Return a meta tensor with a tensor's shape and dtype; None for any other value."""
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else None

"""The laws of lenses: what is stored depends on the tensor alone, not on how it is cut, and comes back as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import torch

from ..mapping import ShardedTensor, ShardedTensorFactory
from ..transforms import Lens, as_factory
from ..trees import apply_factories, apply_factory_merges, leaves_with_paths, map_shards
from ._assemble import assemble
from ._bits import carried, first_difference
from ._tensors import random_bits

_STATE = "optimizer.state.exp_avg."


def check_lens(lens: Lens, shards: Sequence[ShardedTensor]) -> dict[str, torch.Tensor]:
    """Return the stored tensors, by key, after checking the laws of lenses on tensors that are cut in some way.

    - *Boxes agree*: all ranks' stored boxes together are what is stored of the whole tensor, bit for bit.
    - *Merge undoes build*, for each of them. What the lens doesn't store (padding) must merge to one and the same.
    - *Build undoes merge*: whatever is loaded, is stored again as it was.
    - *States are cut alike*: an optimizer's state of another dtype has the same boxes, under its own key.
    - *Data don't matter*: without data the boxes are the same.

    Args:
        lens: any.
        shards: all ranks' shards of a tensor as the model holds it, with data; boxes or flat ranges, replicas too. Of
            several tensors, where those are stored in one.

    Raises:
        AssertionError: names the law, and says what differs.

    Examples:
        >>> from shardtree.transforms import transposed
        >>> shards = [ShardedTensor.from_rank_offsets("w", torch.full((1, 2), rank), (0, rank, 2)) for rank in (0, 1)]
        >>> check_lens(transposed(), shards)
        {'w': tensor([[0, 1],
                [0, 1]])}
    """
    given = assemble([shards])
    wholes = _wholes(given, {shard.key: shard.prepend_axis_num for shard in shards})
    built = [(factory, factory.build()) for factory in (as_factory(whole, lens) for whole in wholes)]
    expected = _stored([tree for _, tree in built])
    held = assemble([[replace(whole, data=_merged(*each)) for whole, each in zip(wholes, built, strict=True)]])
    if _elements(expected) == _elements(given):
        _check_same("merge doesn't undo build on the whole", held, given)
    factories = [as_factory(shard, lens) for shard in shards]
    trees = [factory.build() for factory in factories]
    for shard, factory, tree in zip(shards, factories, trees, strict=True):
        what = f"merge doesn't undo build on {_place(shard)}"
        _check_same(what, {shard.key: _merged(factory, tree)}, {shard.key: _part(held[shard.key], shard)})
        _check_state(factory, tree)
    _check_same("boxes don't agree: assembled, they aren't what is stored of the whole", _stored(trees), expected)
    check_build_undoes_merge(factories, expected)
    return expected


def check_build_undoes_merge(factories: Sequence[ShardedTensorFactory], stored: Mapping[str, torch.Tensor]) -> None:
    """Raise unless tensors of these shapes, once merged, are built again as they were."""
    sizes = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in stored.items()}
    other = {key: random_bits(*size, seed=number) for number, (key, size) in enumerate(sizes.items(), start=7)}
    for factory in factories:
        built = map_shards(lambda leaf: _filled(leaf, other), apply_factories([factory]))
        merged = apply_factory_merges(map_shards(_data, built), [factory])[0]
        again = apply_factories([replace(factory, data=merged)])
        pairs = zip(_shards(built), _shards(again), strict=True)
        for put, found in pairs:
            wrong = first_difference(found.data, put.data)
            assert wrong is None, f"build doesn't undo merge on {_place(put)}: {wrong}"


def _check_state(factory: ShardedTensorFactory, tree: Any) -> None:
    empty = torch.zeros(tuple(factory.data.shape), dtype=torch.float64)
    state = replace(factory, key=_STATE + factory.key, data=empty)
    boxes = [_box(shard) for shard in _shards(tree)]
    as_state = [(_STATE + key, *rest) for key, *rest in boxes]
    found = [_box(shard) for shard in _shards(state.build())]
    assert found == as_state, f"a state of {factory.key!r} is cut otherwise: {found}, not {as_state}"
    bare = [_box(shard) for shard in _shards(factory.without_data().build())]
    assert bare == boxes, f"without data {factory.key!r} is cut otherwise: {bare}, not {boxes}"


def _wholes(tensors: Mapping[str, torch.Tensor], prepended: Mapping[str, int]) -> list[ShardedTensor]:
    """Return each tensor as one shard, or as one for each place along its prepended axes."""
    wholes = []
    for key, tensor in tensors.items():
        front = prepended[key]
        shape, local = tuple(tensor.shape), tuple(tensor.shape[front:])
        for place in product(*map(range, shape[:front])):
            offset = (*place, *(0 for _ in local))
            data = carried(tensor)[place].view(tensor.dtype)
            wholes.append(ShardedTensor(key, data, tensor.dtype, local, shape, offset, None, prepend_axis_num=front))
    return wholes


def _elements(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


def _stored(trees: Sequence[Any]) -> dict[str, torch.Tensor]:
    return assemble([map_shards(_without_copies, tree) for tree in trees])


def _without_copies(leaf: Any) -> Any:
    return replace(leaf, replica_id=0) if isinstance(leaf, ShardedTensor) else leaf


def _merged(factory: ShardedTensorFactory, tree: Any) -> torch.Tensor:
    merged = apply_factory_merges(map_shards(_data, [tree]), [factory])[0]
    assert isinstance(merged, torch.Tensor), f"merge of {factory.key!r} gave a {type(merged).__name__}"
    return merged


def _data(leaf: Any) -> Any:
    """Return a copy, as it would be loaded."""
    return carried(leaf.data).clone().view(leaf.dtype) if isinstance(leaf, ShardedTensor) else leaf


def _filled(leaf: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if not isinstance(leaf, ShardedTensor):
        return leaf
    return replace(leaf, data=_part(tensors[leaf.key], leaf))


def _part(tensor: torch.Tensor, shard: ShardedTensor) -> torch.Tensor:
    box = carried(tensor)[shard.global_slice()].contiguous()
    flat = shard.flattened_range
    return (box if flat is None else box.view(prod(box.shape))[flat]).view(tensor.dtype)


def _shards(tree: Any) -> list[ShardedTensor]:
    return [leaf for _, leaf in leaves_with_paths(tree) if isinstance(leaf, ShardedTensor)]


def _box(shard: ShardedTensor) -> tuple[Any, ...]:
    return shard.key, shard.global_shape, shard.global_offset, shard.local_shape, shard.replica_id


def _place(shard: ShardedTensor) -> str:
    flat = "" if shard.flattened_range is None else f", {shard.flattened_range} of it"
    return f"{shard.key!r}, box {shard.local_shape} at {shard.global_offset}{flat}"


def _check_same(what: str, found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected), f"{what}: found {sorted(found)}, expected {sorted(expected)}"
    for key, tensor in expected.items():
        wrong = first_difference(found[key], tensor)
        assert wrong is None, f"{what}: {key}: {wrong}"

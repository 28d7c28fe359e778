"""The law of factories: what is built and merged again is what it was, parameters and optimizer states alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..mapping import ShardedBase, ShardedTensor, ShardedTensorFactory
from ..trees import apply_factories, apply_factory_merges, leaves_with_paths, map_shards
from ._bits import carried, first_difference
from ._tensors import random_bits

_MOMENT_DTYPES = (torch.float32, torch.bfloat16)


def check_factory(factory: ShardedTensorFactory, *, flat: Sequence[slice] = ()) -> None:
    """Raise unless merging undoes building, for the factory's tensor and for optimizer states of it.

    A state is a tensor of the same shape and maybe another dtype, under another key, which optimizers hand to the
    factory's `build_fn`. It must be cut as the tensor is: the same boxes of tensors of the same global shapes.

    Args:
        factory: one with data.
        flat: slices of the row-major flattened tensor that the factory should also build from, as flat optimizer
            states need it.

    Raises:
        AssertionError: says which tensor doesn't come back, or is cut otherwise than the parameter.

    Examples:
        >>> from shardtree.testing import transposed
        >>> check_factory(transposed("w", torch.arange(6).reshape(2, 3)))
    """
    check_merge_undoes_build(factory)
    for number, dtype in enumerate(_MOMENT_DTYPES):
        moment = random_bits(tuple(factory.data.shape), dtype, seed=number + 1)
        state = replace(factory, key=f"optimizer.state.{number}.{factory.key}", data=moment)
        check_merge_undoes_build(state)
        check_cut_alike(factory, state)
    for part in flat:
        data = carried(factory.data).contiguous().view(-1)[part].view(factory.data.dtype)
        check_merge_undoes_build(replace(factory, data=data, flattened_range=part))


def check_merge_undoes_build(factory: ShardedTensorFactory) -> None:
    """Raise unless the factory merges what it builds, read back into new memory, to the tensor that it was given."""
    merged = apply_factory_merges(map_shards(_reloaded, apply_factories([factory])), [factory])[0]
    found = merged if isinstance(merged, torch.Tensor) else torch.empty(0)
    wrong = first_difference(found, factory.data)
    assert wrong is None, f"merge doesn't undo build for {factory.key!r}{_range(factory)}: {wrong}"


def check_cut_alike(factory: ShardedTensorFactory, state: ShardedTensorFactory) -> None:
    """Raise unless both factories build the same boxes, at the same paths, of tensors of the same global shapes."""
    left, right = (_boxes(apply_factories([each])) for each in (factory, state))
    assert left == right, f"{state.key!r} is cut otherwise than {factory.key!r}: {right}, not {left}"


def _reloaded(leaf: Any) -> Any:
    if isinstance(leaf, ShardedTensor):
        return carried(leaf.data).clone().view(leaf.dtype)
    return leaf.data if isinstance(leaf, ShardedBase) else leaf


def _boxes(tree: Any) -> list[Any]:
    return [
        (path, leaf.global_shape, leaf.global_offset, leaf.local_shape, leaf.flattened_range)
        for path, leaf in leaves_with_paths(tree)
        if isinstance(leaf, ShardedTensor)
    ]


def _range(factory: ShardedTensorFactory) -> str:
    return "" if factory.flattened_range is None else f" on {factory.flattened_range}"

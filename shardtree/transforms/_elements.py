"""Elements of global tensors that a rank includes in a reduction: exactly one rank includes each element."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

from ..core.lazy import LazyTensor
from ..core.mapping import ShardedBase, ShardedTensor, has_elements, is_main_replica
from ..core.trees import apply_factories, flatten_visible
from ..errors import IntegrityError, TreePath, error_text, render_path
from ._by_key import map_with_path


def reduced_here(
    f: Callable[..., Any], combine: Callable[[Any, Any], Any], tree: Any, *rest: Any, rank: int
) -> list[Any]:
    """Return a rank's part of a reduction: its combined value, in a list; an empty list if it includes no tensor.

    A rank includes the shards that are main replicas, after factories are applied. In a tree without shards, rank 0
    includes all plain tensors, and other ranks none. Lazy tensors are read, one after the other.

    Args:
        f: A function of a tensor, and of the values at its path in `rest`.
        combine: An associative function of two values of f.
        tree: The rank's tree.
        rest: Further trees with the structure of `tree`.
        rank: Number of the rank.

    Raises:
        IntegrityError: An included tensor has no data, for example on the meta device; the error names each.

    Examples:
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.tensor([1.0, 2.0]))
        >>> reduced_here(torch.sum, torch.add, {"w": shard, "step": torch.tensor(3)}, rank=1)
        [tensor(3.)]
        >>> reduced_here(torch.sum, torch.add, {"step": torch.tensor(3)}, rank=1)
        []
    """
    trees = [apply_factories(part) for part in (tree, *rest)]
    leaves, _ = flatten_visible(trees[0])
    has_shards = any(isinstance(leaf, ShardedBase) for leaf in leaves)
    empty: list[str] = []
    values: list[Any] = []

    def on_leaf(path: TreePath, leaf: Any, *others: Any) -> None:
        if not _is_counted(leaf, has_shards, rank):
            return
        tensors = [other.data if isinstance(other, ShardedTensor) else other for other in (leaf, *others)]
        if any(tensor is None or (isinstance(tensor, torch.Tensor) and not has_elements(tensor)) for tensor in tensors):
            empty.append(render_path(path))
        elif not empty:
            values.append(f(*(tensor.read() if isinstance(tensor, LazyTensor) else tensor for tensor in tensors)))

    map_with_path(on_leaf, *trees)
    if empty:
        raise IntegrityError(
            error_text("a reduction over tensors that have no data", offenders=empty, fix="Load these tensors first.")
        )
    return [reduce(combine, values)] if values else []


def _is_counted(leaf: Any, has_shards: bool, rank: int) -> bool:
    if isinstance(leaf, ShardedTensor):
        return is_main_replica(leaf.replica_id)
    return not has_shards and rank == 0 and isinstance(leaf, (torch.Tensor, LazyTensor))


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as float64, int64 or complex128, in which its elements can be added up.

    Examples:
        >>> widened(torch.ones(1, dtype=torch.bfloat16)).dtype, widened(torch.tensor([True])).dtype
        (torch.float64, torch.int64)
    """
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64)

"""Reductions over the elements of global tensors: each element counts once, however many replicas it has."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from math import inf
from typing import Any

import torch

from ..core.ambient import shielded
from ..core.geometry import refuse
from ..core.layouts import ShardColumns, access_problems, join_columns, shard_columns
from ..core.mapping import ShardedTensor
from ..core.offences import offences_text
from ..core.trees import apply_factories, flatten_visible
from ..errors import IntegrityError, MetadataError
from ..shell.world import World, current_world, gather
from ..transforms import reduced_here, widened


def reduce_elements(
    f: Callable[..., Any],
    tree: Any,
    *rest: Any,
    combine: Callable[[Any, Any], Any] = operator.add,
    initial: Any = 0,
    world: World | None = None,
) -> Any:
    """Return a reduction over all elements of a global tree, on every rank; each rank passes its own part.

    Each element counts once, on the rank that holds its main replica. Factories are applied, so that elements are
    counted as they are stored, without padding. Plain tensors beside shards do not count. In a tree without shards, the
    plain tensors of rank 0 count.

    Args:
        f: Function of a tensor of elements, in any shape, and of the further trees' values at that leaf. Combined over
            calls, its value must not depend on how elements are spread over calls, except for rounding.
        tree: Any tree of this rank.
        rest: Further trees with the structure and layout of `tree`, as for `map_data`.
        combine: Associative and commutative function of two values of `f`.
        initial: The result if no tensor counts on any rank.
        world: The ranks that hold the tree; torch.distributed's default group, or else this process alone.

    Raises:
        IntegrityError: A rank has no data for a tensor whose elements it counts; or the main replicas of the ranks do
            not hold each element of a global tensor once, for example because `world` leaves out some ranks.
        Exception: An error of `f`, with the leaf's path as a note.

    Examples:
        >>> import shardtree as st
        >>> tree = {"w": st.ShardedTensor.from_rank_offsets("w", torch.tensor([1.0, -2.0, 3.0])), "step": 7}
        >>> reduce_elements(lambda elements: int((elements < 0).sum()), tree)
        1
        >>> reduce_elements(lambda left, right: (left * right).sum().item(), tree, tree)
        14.0

    References:
        jax.tree.reduce.
    """
    return _reduced(f, combine, (tree, *rest), initial, world)


@shielded
def _reduced(
    f: Callable[..., Any],
    combine: Callable[[Any, Any], Any],
    trees: Sequence[Any],
    initial: Any,
    world: World | None,
    **given: object,
) -> Any:
    """Return the reduction over the trees of all ranks; collective.

    Args:
        f: Argument of `reduce_elements`.
        combine: Argument of `reduce_elements`.
        trees: The rank's trees, to which `f` is applied leaf by leaf.
        initial: Argument of `reduce_elements`.
        world: Argument of `reduce_elements`.
        given: Other arguments of the caller that must be the same on all ranks.
    """
    ranks = current_world() if world is None else world

    def own() -> tuple[list[Any], ShardColumns]:
        built = [apply_factories(tree) for tree in trees]
        values = reduced_here(f, combine, *built, rank=ranks.rank)
        shards = [leaf for leaf in flatten_visible(built[0])[0] if isinstance(leaf, ShardedTensor)]
        return [*map(_portable, values)], shard_columns(shards, ranks.rank)

    parts = gather(ranks, "reduce_elements: reduce", own, given=given)
    # A world without some ranks, or ranks whose shards each claim to be whole, would give a plausible wrong number.
    if problems := access_problems(join_columns([columns for _, columns in parts])):
        heading = "reduce_elements: the ranks do not hold each element of the global tensors once"
        fix = "Pass the world of all ranks that hold the tree. For one rank's part alone, pass its plain tensors."
        raise IntegrityError(offences_text(heading, problems, fix))
    values = [value for own_values, _ in parts for value in own_values]
    return reduce(combine, values) if values else initial


def _portable(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def tree_sum(tree: Any, *, world: World | None = None) -> complex:
    """Return the sum of all elements of a global tree, each counted once.

    Args:
        tree: Any tree of this rank. Floating-point elements are added in 64 bits, integers exactly.
        world: The ranks that hold the tree, as for `reduce_elements`.

    Raises:
        IntegrityError: A rank has no data for a tensor whose elements it counts; or the main replicas of the ranks do
            not hold each element of a global tensor once, for example because `world` leaves out some ranks.

    Examples:
        >>> import shardtree as st
        >>> tree_sum({"n": torch.tensor([2**63 - 1, 1])}) == 2**63
        True
        >>> trees = st.shard({"w": torch.arange(4)}, st.Mesh(dp=2, tp=2), st.P("tp"))
        >>> st.simulate(4, lambda world: tree_sum(trees[world.rank], world=world))
        [6, 6, 6, 6]

    References:
        optax.tree.sum.
    """
    return reduce_elements(_exact_sum, tree, world=world)  # type: ignore[no-any-return]


_HALF = 32  # bits


def _exact_sum(elements: torch.Tensor) -> complex:
    """Return the sum of a tensor's elements; the sum of integers is exact, while torch's int64 sum would wrap."""
    if elements.is_floating_point() or elements.is_complex():
        return widened(elements).sum().item()
    # uint64 has no arithmetic in torch: its bits are read as int64, and the sign of the high half is removed below.
    unsigned = elements.dtype == torch.uint64
    numbers = elements.contiguous().view(torch.int64) if unsigned else widened(elements)
    high, low = numbers >> _HALF, numbers & ((1 << _HALF) - 1)
    if unsigned:
        high = high & ((1 << _HALF) - 1)
    # Halves of 32 bits: 2**31 of them can be added in 64.
    return (int(high.sum()) << _HALF) + int(low.sum())


def tree_norm(tree: Any, *, ord: float = 2, world: World | None = None) -> float:
    """Return the norm of all elements of a global tree as one vector, each counted once.

    Args:
        tree: Any tree of this rank. Powers are added in 64 bits.
        ord: Order of the norm: a positive number, or infinity for the largest absolute value.
        world: The ranks that hold the tree, as for `reduce_elements`.

    Raises:
        IntegrityError: A rank has no data for a tensor whose elements it counts; or the main replicas of the ranks do
            not hold each element of a global tensor once, for example because `world` leaves out some ranks.
        WorldError: The ranks passed different orders.
        MetadataError: The order isn't a positive number.

    Examples:
        >>> tree_norm({"w": torch.tensor([3.0, -4.0])}), tree_norm({"w": torch.tensor([3.0, -4.0])}, ord=float("inf"))
        (5.0, 4.0)

    References:
        optax.tree.norm; torch.nn.utils.get_total_norm.
    """
    if isinstance(ord, bool) or not isinstance(ord, (int, float)) or not ord > 0:
        refuse("tree_norm", "ord", ord, "a positive number", "Pass 2, 1 or float('inf').", error=MetadataError)
    if ord == inf:
        return float(_reduced(_largest, _larger, (tree,), 0.0, world, ord=ord))
    total: float = _reduced(partial(_power_sum, ord), operator.add, (tree,), 0.0, world, ord=ord)
    return float(total ** (1 / ord))


def _power_sum(ord: float, elements: torch.Tensor) -> float:
    return float(widened(elements).abs().double().pow(ord).sum())


def _largest(elements: torch.Tensor) -> float:
    return float(widened(elements).abs().max()) if elements.numel() else 0.0


def _larger(left: float, right: float) -> float:
    # A NaN compares as neither smaller nor larger, and must not get lost.
    return left if left >= right or left != left else right

"""The law of resharding in memory: each element goes where its target wants it, and nothing that is given changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch

from ..errors import TreePath, render_path
from ..mapping import ShardedTensor
from ..plans import ReshardPlan
from ..plans import reshard as st_reshard
from ..trees import apply_factories, leaves_with_paths
from ._assemble import assemble
from ._bits import first_difference, outline
from ._law_purity import check_pure
from ._law_reshard_plans import check_reshard_plan
from ._layout import flattened

RankTrees = Sequence[Any] | Mapping[int, Any]


@overload
def check_reshard(plan: ReshardPlan, /) -> None: ...


@overload
def check_reshard(trees: RankTrees, targets: RankTrees, /, *, reshard: Callable[..., Any] = st_reshard) -> None: ...


def check_reshard(
    plan_or_trees: Any, targets: RankTrees | None = None, /, *, reshard: Callable[..., Any] = st_reshard
) -> None:
    """Raise unless resharding trees gives each target what the trees hold at its place, bit for bit, and can be undone.

    Given a plan alone, it is `check_reshard_plan`: each element of each target is written once, with itself, and no
    more moves than must.

    The trees must hold whole tensors among them; the reference puts these together element by element, so keep shapes
    small. Where the targets hold all of it too, resharding back must give the trees again. Arguments must stay as they
    are, and results share no memory with them, nor with each other. The trees' objects must keep their shapes.

    Args:
        plan_or_trees: a plan; or each rank's tree, by rank: a mapping, or a list that begins with rank 0.
        targets: likewise what is wanted.
        reshard: called as ``reshard(trees, targets)``. Where one casts, `torch.Tensor.to` says what is expected, and
            there and back isn't asked for.

    Raises:
        AssertionError: names the rank and the place, and how it differs.

    Examples:
        >>> from shardtree.layouts import Mesh, PartitionSpec, shard
        >>> from shardtree.plans import plan_reshard
        >>> tree = {"w": torch.arange(15).view(5, 3)}
        >>> by_rows = shard(tree, Mesh(dp=2), PartitionSpec("dp"))
        >>> by_columns = shard(tree, Mesh(tp=3), PartitionSpec(None, "tp"))
        >>> check_reshard(by_rows, by_columns)
        >>> check_reshard(plan_reshard(by_rows, by_columns))
    """
    if isinstance(plan_or_trees, ReshardPlan):
        return check_reshard_plan(plan_or_trees)
    assert targets is not None, "trees are resharded to targets: check_reshard(trees, targets)"
    return _check_trees(plan_or_trees, targets, reshard)


def _check_trees(trees: RankTrees, targets: RankTrees, reshard: Callable[..., Any]) -> None:
    found = check_pure(reshard, trees, targets)
    assert _ranks(found) == _ranks(targets), f"found ranks {_ranks(found)}, expected {_ranks(targets)}"
    wholes = assemble(_built(trees).values())
    wanted, got = _built(targets), _built(found)
    for rank, tree in wanted.items():
        _check_rank(rank, tree, got[rank], wholes)
    _check_apart(got, [_built(trees), wanted])
    if _hold_all(got.values(), wholes):  # in their own dtypes: what was cast isn't the same again
        back = _built(reshard(found, _by_rank(trees)))
        for rank, tree in _built(trees).items():
            _check_back(rank, tree, back[rank])


def _by_rank(trees: RankTrees) -> dict[int, Any]:
    return dict(trees) if isinstance(trees, Mapping) else dict(enumerate(trees))


def _ranks(trees: RankTrees) -> list[int]:
    return list(_by_rank(trees))


def _built(trees: RankTrees) -> dict[int, Any]:
    return {rank: apply_factories(tree) for rank, tree in _by_rank(trees).items()}


def _shards(tree: Any) -> dict[TreePath, ShardedTensor]:
    return {path: leaf for path, leaf in leaves_with_paths(tree) if isinstance(leaf, ShardedTensor)}


def _check_rank(rank: int, target: Any, found: Any, wholes: Mapping[str, torch.Tensor]) -> None:
    """Raise unless a rank's shards are where its target has them, and hold what is at their place."""
    wanted, got = _shards(target), _shards(found)
    assert wanted.keys() == got.keys(), f"rank {rank}: found shards at {list(got)}, expected {list(wanted)}"
    for path, shard in wanted.items():
        where = f"rank {rank}: {shard.key!r} at {render_path(path)}"
        assert got[path].without_data() == shard.without_data(), f"{where}: found {got[path]}, expected {shard}"
        box = wholes[shard.key][shard.global_slice()]
        held = box if shard.flattened_range is None else flattened(box)[shard.flattened_range]
        expected = held if held.dtype == shard.dtype else held.to(shard.dtype)
        differ = first_difference(got[path].data, expected)
        assert differ is None, f"{where}: {differ}"


def _check_apart(found: Mapping[int, Any], given: Sequence[Mapping[int, Any]]) -> None:
    """Raise if tensors of different ranks, or those that were given, share memory."""
    owners = {_address(shard.data): "what was given" for trees in given for shard in _with_memory(trees.values())}
    for rank, tree in found.items():
        own = {_address(shard.data) for shard in _with_memory([tree])}
        shared = [owners[address] for address in own if address in owners]
        assert not shared, f"rank {rank} shares memory with {shared[0]}"
        owners |= dict.fromkeys(own, f"rank {rank}")


def _with_memory(trees: Any) -> list[ShardedTensor]:
    shards = [shard for tree in trees for shard in _shards(tree).values()]
    return [
        shard
        for shard in shards
        if isinstance(shard.data, torch.Tensor) and shard.data.nbytes and not shard.data.is_meta
    ]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _hold_all(trees: Any, wholes: Mapping[str, torch.Tensor]) -> bool:
    """Return whether trees hold all elements of all tensors, in their dtypes."""
    listed = list(trees)
    try:
        found = assemble(listed)
    except AssertionError:
        return False
    return {key: one.dtype for key, one in found.items()} == {key: one.dtype for key, one in wholes.items()}


def _check_back(rank: int, before: Any, after: Any) -> None:
    """Raise unless a rank's tree is what it was, but for the order of its keys."""
    left, right = ({path: outline(leaf) for path, leaf in leaves_with_paths(tree)} for tree in (before, after))
    wrong = [path for path in left.keys() | right.keys() if left.get(path) != right.get(path)]
    assert not wrong, f"rank {rank}: there and back, {render_path(min(wrong, key=str))} is another"

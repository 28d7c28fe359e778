"""The laws of resharding: plans, checked element by element, and resharded trees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, overload

import numpy as np
import torch

from ..core.layouts import ShardColumns
from ..core.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory
from ..core.plans import convertible
from ..core.trees import apply_factories, leaves_with_paths
from ..errors import TreePath, render_path
from ..live.resharding import ReshardPlan
from ..live.resharding import reshard as st_reshard
from ._bits import assemble, check_equal, outline, shards_of
from ._law_plans import Element, shard_elements
from ._law_purity import check_pure
from ._layouts import flattened

# Plans.

_Filled = dict[tuple[int, int], int]


def check_reshard_plan(plan: ReshardPlan) -> None:
    """Raise unless a plan fills its target, moves no more than it must, and reports its own totals correctly.

    Each element of each target shard must be written once, from a shard on the rank that the plan names. That is a
    source shard, or a target shard into which an earlier transfer has written the element. A rank may receive only
    elements that it holds afterwards and didn't hold before. The reference visits every element, so keep shapes small.

    Args:
        plan: The plan to check.

    Raises:
        AssertionError: The plan is wrong; the error names the shard and the element, or the numbers that differ.

    Examples:
        >>> import torch, shardtree as st
        >>> whole = {"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(4))}
        >>> check_reshard_plan(st.plan_reshard({0: whole}, {0: whole, 1: whole}))
    """
    check_filled(plan)
    # The plan's own check is under test too, so it must agree with the reference.
    assert plan.check() == (), f"nothing is wrong, but the plan says {plan.check()[0]}"
    lacking = wanted_bytes(plan)
    least = sum(lacking.values())
    assert plan.bytes_moved == least, f"{plan.bytes_moved} bytes move, expected {least}"
    assert plan.lower_bound == least, f"the plan says that {plan.lower_bound} bytes must move, but {least} must"
    sums = {rank: nbytes for rank, nbytes in plan.received.items() if nbytes}
    assert sums == dict(lacking), f"ranks get {sums}, expected {dict(lacking)}"
    links = plan.links
    for name, end, totals in (("sent", 0, plan.sent), ("received", 1, plan.received)):
        link_sums = {rank: sum(count for link, count in links.items() if link[end] == rank) for rank in plan.ranks}
        assert totals == link_sums, f"{name} is {totals}, and the links add up to {link_sums}"
    target_bytes = int((plan.target.elements * plan.target.item_size[plan.target.key]).sum())
    stays = plan.bytes_kept, sum(plan.kept.values())
    assert stays == (target_bytes - least,) * 2, f"{stays} bytes are said to stay, expected {target_bytes - least}"


def check_filled(plan: ReshardPlan) -> None:
    """Raise unless each element of each target shard is written once, from a shard that has the same element.

    Args:
        plan: The plan to check.

    Raises:
        AssertionError: The plan is wrong; the error names the transfer, or the shard and the element.

    Examples:
        >>> import torch, shardtree as st
        >>> whole = st.ShardedTensor.from_rank_offsets("w", torch.zeros(3))
        >>> check_filled(st.plan_reshard([[whole], []], [[], [whole]]))
    """
    sources = [shard_elements(plan.source, row) for row in range(len(plan.source))]
    targets = [shard_elements(plan.target, row) for row in range(len(plan.target))]
    hops: _Filled = {}
    transfers = plan.transfers
    # Transfers are in order of hops, since a relay may only read elements that an earlier hop has written.
    for row in np.argsort(transfers.hop, kind="stable").tolist():
        hop, source, target = int(transfers.hop[row]), int(transfers.source[row]), int(transfers.target[row])
        columns, elements = (plan.target, targets) if hop else (plan.source, sources)
        assert hop >= 0 and 0 <= source < len(columns) and 0 <= target < len(plan.target), f"{row} has no such shard"
        _check_transfer_fields(plan, row, columns)
        places = _element_positions(plan, row)
        assert places, f"transfer {row} is empty"
        for element, at, to in places:
            assert 0 <= at < len(elements[source]), f"transfer {row} reads beyond shard {source}"
            assert elements[source][at] == element, f"transfer {row} takes {elements[source][at]} for {element}"
            assert not hop or hops.get((source, at), hop) < hop, f"transfer {row} reads {element} too early"
            assert 0 <= to < len(targets[target]), f"transfer {row} writes beyond shard {target}"
            assert targets[target][to] == element, f"transfer {row} puts {element} at {targets[target][to]}"
            assert (target, to) not in hops, f"{element} of shard {target} is written twice"
            hops[target, to] = hop
    count = sum(map(len, targets))
    assert len(hops) == count, f"{len(hops)} elements are written, of {count}"


def _check_transfer_fields(plan: ReshardPlan, row: int, columns: ShardColumns) -> None:
    """Raise unless the ranks, key and bytes of a transfer match its shards and box."""
    transfers, source, target = plan.transfers, int(plan.transfers.source[row]), int(plan.transfers.target[row])
    ranks = (int(transfers.from_rank[row]), int(transfers.to_rank[row]))
    expected = (int(columns.rank[source]), int(plan.target.rank[target]))
    assert ranks == expected, f"transfer {row} names ranks {ranks}, expected {expected}"
    number = int(plan.target.key[target])
    key, kind = plan.target.keys[number], plan.target.kinds[number]
    source_key = int(columns.key[source])
    assert columns.keys[source_key] == key, f"transfer {row} mixes tensors"
    # At hop 0 elements may be converted to the target's dtype; at later hops they have it already.
    assert convertible(columns.kinds[source_key].dtype, kind.dtype), f"transfer {row} mixes dtypes"
    assert int(transfers.key[row]) == number, f"transfer {row} names another tensor"
    size = int(np.prod(transfers.shape[row])) * kind.dtype.itemsize
    assert int(transfers.nbytes[row]) == size, f"transfer {row} has {size} bytes, not {transfers.nbytes[row]}"


def _element_positions(plan: ReshardPlan, row: int) -> list[tuple[Element, int, int]]:
    """Return (global index, position in the source's data, position in the target's) for each element of a transfer."""
    transfers = plan.transfers
    positions = []
    for place in product(*map(range, transfers.shape[row].tolist())):
        at = int(transfers.source_element[row] + np.dot(place, transfers.source_stride[row]))
        to = int(transfers.target_element[row] + np.dot(place, transfers.target_stride[row]))
        positions.append((tuple((transfers.offset[row] + place).tolist()), at, to))
    return positions


def wanted_bytes(plan: ReshardPlan) -> Counter[int]:
    """Return the number of bytes that each rank holds only after resharding; ranks without any are left out."""
    lacking: Counter[int] = Counter()
    sizes = {key: kind.dtype.itemsize for key, kind in zip(plan.target.keys, plan.target.kinds, strict=True)}
    for rank, key, _ in _elements_by_rank(plan.target) - _elements_by_rank(plan.source):
        lacking[rank] += sizes[key]
    return lacking


def _elements_by_rank(columns: ShardColumns) -> set[tuple[int, str, Element]]:
    return {
        (int(columns.rank[row]), columns.keys[int(columns.key[row])], element)
        for row in range(len(columns))
        for element in shard_elements(columns, row)
    }


RankTrees = Sequence[Any] | Mapping[int, Any]


@overload
def check_reshard(plan: ReshardPlan, /) -> None: ...


@overload
def check_reshard(trees: RankTrees, targets: RankTrees, /, *, reshard: Callable[..., Any] = st_reshard) -> None: ...


def check_reshard(
    plan_or_trees: Any, targets: RankTrees | None = None, /, *, reshard: Callable[..., Any] = st_reshard
) -> None:
    """Raise unless resharding gives each target the trees' elements, bit for bit, and can be undone.

    With a plan alone it checks that each element of each target is written once, from the same element of the same
    tensor, and that no more bytes move than necessary.

    The trees together must hold whole tensors; the reference assembles them element by element, so keep shapes small.
    If the targets hold all elements too, resharding back must give the trees again. Arguments must not change, and
    results must not share memory with them or with each other. An array of objects must have the same shape in trees
    and targets.

    Args:
        plan_or_trees: A plan; or all ranks' trees, as a mapping by rank or a list that begins with rank 0.
        targets: All ranks' targets, as a mapping by rank or a list that begins with rank 0.
        reshard: The function under test, called as ``reshard(trees, targets)``. If it casts, `torch.Tensor.to` gives
            the expected values, and resharding back isn't checked.

    Raises:
        AssertionError: A result is wrong; the error names the rank, the path and the difference.

    Examples:
        >>> from shardtree.layouts import Mesh, PartitionSpec, shard
        >>> from shardtree.plans import plan_reshard
        >>> tree = {"w": torch.arange(15).view(5, 3)}
        >>> by_rows = shard(tree, Mesh(dp=2), PartitionSpec("dp"))
        >>> by_columns = shard(tree, Mesh(tp=3), PartitionSpec(None, "tp"))
        >>> check_reshard(by_rows, by_columns)
        >>> check_reshard(plan_reshard(by_rows, by_columns))
    """
    # Both laws have one name, since they are one question to a caller: a plan's law is about which elements move, the
    # law of trees about their values.
    if isinstance(plan_or_trees, ReshardPlan):
        return check_reshard_plan(plan_or_trees)
    assert targets is not None, "trees are resharded to targets: check_reshard(trees, targets)"
    return _check_trees(plan_or_trees, targets, reshard)


def _check_trees(trees: RankTrees, targets: RankTrees, reshard: Callable[..., Any]) -> None:
    results = check_pure(reshard, trees, targets)
    assert _ranks(results) == _ranks(targets), f"found ranks {_ranks(results)}, expected {_ranks(targets)}"
    whole_trees, goals, result_trees = _build(trees), _build(targets), _build(results)
    wholes = assemble(whole_trees.values())
    for rank, tree in goals.items():
        _check_rank(rank, tree, result_trees[rank], wholes)
    _check_no_aliases(result_trees, [whole_trees, goals])
    # Trees come back only if the targets have all elements in the same dtypes: a cast may round them.
    if _hold_all(result_trees.values(), wholes):
        back = _by_rank(reshard(results, _by_rank(trees)))
        for rank, tree in _by_rank(trees).items():
            # Unchanged, apart from the order of keys.
            for left, right in zip(_contents(tree), _contents(back[rank]), strict=True):
                wrong = [path for path in left.keys() | right.keys() if left.get(path) != right.get(path)]
                assert not wrong, f"rank {rank}: there and back, {render_path(min(wrong, key=str))} differs"


def _contents(tree: Any) -> tuple[dict[TreePath, Any], dict[TreePath, Any]]:
    """Return the content of a tree's leaves, by path, in a form that `==` can compare (see `outline`).

    Returns:
        The leaves of the tree itself, where factories are compared without their data; and the leaves after factories
        were built, without those that aren't stored (`LocalNonpersistentObject`).
    """
    leaves = [
        (path, leaf.without_data() if isinstance(leaf, ShardedTensorFactory) else leaf)
        for path, leaf in leaves_with_paths(tree)
    ]
    # Local objects that a factory builds for its merge hold the rank's memory; the factory's functions are compared.
    built = leaves_with_paths(apply_factories(tree))
    stored = {path: outline(leaf) for path, leaf in built if not isinstance(leaf, LocalNonpersistentObject)}
    return {path: outline(leaf) for path, leaf in leaves}, stored


def _by_rank(trees: RankTrees) -> dict[int, Any]:
    return dict(trees) if isinstance(trees, Mapping) else dict(enumerate(trees))


def _ranks(trees: RankTrees) -> list[int]:
    return list(_by_rank(trees))


def _build(trees: RankTrees) -> dict[int, Any]:
    return {rank: apply_factories(tree) for rank, tree in _by_rank(trees).items()}


def _check_rank(rank: int, target: Any, found: Any, wholes: Mapping[str, torch.Tensor]) -> None:
    """Raise unless a rank's shards are at the paths of its target, with the right elements."""
    goals, results = shards_of(target), shards_of(found)
    assert goals.keys() == results.keys(), f"rank {rank}: found shards at {list(results)}, expected {list(goals)}"
    for path, shard in goals.items():
        where = f"rank {rank}: {shard.key!r} at {render_path(path)}"
        assert results[path].without_data() == shard.without_data(), f"{where}: found {results[path]}, expected {shard}"
        box = wholes[shard.key][shard.global_slice()]
        part = box if shard.flattened_range is None else flattened(box)[shard.flattened_range]
        expected = part if part.dtype == shard.dtype else part.to(shard.dtype)
        check_equal(where, results[path].data, expected)


def _check_no_aliases(results: Mapping[int, Any], arguments: Sequence[Mapping[int, Any]]) -> None:
    """Raise if results of different ranks share memory, with each other or with the arguments."""
    # Ranks in one process could share memory, but real ranks can't: a test on simulated ranks would pass by accident.
    owners = {_address(shard.data): "an argument" for trees in arguments for shard in _with_memory(trees.values())}
    for rank, tree in results.items():
        addresses = {_address(shard.data) for shard in _with_memory([tree])}
        shared = [owners[address] for address in addresses if address in owners]
        assert not shared, f"rank {rank} shares memory with {shared[0]}"
        owners |= dict.fromkeys(addresses, f"rank {rank}")


def _with_memory(trees: Any) -> list[ShardedTensor]:
    shards = [shard for tree in trees for shard in shards_of(tree).values()]
    return [
        shard
        for shard in shards
        if isinstance(shard.data, torch.Tensor) and shard.data.nbytes and not shard.data.is_meta
    ]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _hold_all(trees: Any, wholes: Mapping[str, torch.Tensor]) -> bool:
    """Return whether trees hold all elements of all tensors, in the same dtypes."""
    try:
        tensors = assemble(list(trees))
    except AssertionError:
        return False
    return {key: found.dtype for key, found in tensors.items()} == {key: whole.dtype for key, whole in wholes.items()}

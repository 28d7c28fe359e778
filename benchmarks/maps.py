"""Maps over a tree of 100,000 shards beside plain optree: ``python -m benchmarks.maps``.

Plain optree is ``optree.tree_map`` in its default namespace, where a shard is a leaf as anything else is, and the same
with an ``is_leaf`` that asks for shards; everybody's function gives back the leaf that it took, so that only the map is
timed. `map_data` has no such peer: its bar is microseconds a leaf, also where each leaf gets a new tensor and so
becomes a new shard. Trees: one dict of all, and 1,000 dicts of 100 in a list. Garbage is collected before each try.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import optree
import torch

import shardtree as st

from ._measuring import Bar, Seconds, Settings, in_turns, print_bars, ratio, run

MOST_RATIO = 1.3
MOST_MICROSECONDS = 6.0

OURS, PLAIN, ASKED = "map_shards", "optree.tree_map", "optree.tree_map, is_leaf"
KEPT, NEW, ALONE = "map_data, same data", "map_data, new data", "the function alone"
UNIT = "µs/leaf"


def bars(settings: Settings) -> list[Bar]:
    """Return the bars of both trees."""
    inner, rounds, tries = (10, 1, 1) if settings.quick else (100, 5, 3)
    outer = 10 * inner
    found = []
    for name, tree in (("one dict", _flat(inner * outer)), (f"{outer:,} dicts", _nested(outer, inner))):
        actions = _actions(tree)
        _check(tree)
        seconds = in_turns(actions, rounds=rounds, tries=tries)
        found += _rows(f"{inner * outer:,} shards, {name}", seconds, inner * outer)
    print_bars(f"Tree maps, medians of {rounds} rounds", found, settings.console)
    return found


def _flat(count: int) -> dict[str, st.ShardedTensor]:
    return {f"k{number}": _shard(number) for number in range(count)}


def _nested(outer: int, inner: int) -> list[dict[str, st.ShardedTensor]]:
    return [{f"k{key}": _shard(first * inner + key) for key in range(inner)} for first in range(outer)]


def _shard(number: int) -> st.ShardedTensor:
    return st.ShardedTensor.from_rank_offsets(f"k{number}", torch.full((4,), number))


def _actions(tree: Any) -> dict[str, Callable[[], Any]]:
    tensors = [leaf.data for leaf in _leaves(tree)]
    return {
        OURS: lambda: st.map_shards(_same, tree),
        PLAIN: lambda: optree.tree_map(_same, tree, none_is_leaf=True),
        ASKED: lambda: optree.tree_map(_same, tree, is_leaf=_is_shard, none_is_leaf=True),
        KEPT: lambda: st.map_data(_same, tree),
        NEW: lambda: st.map_data(torch.Tensor.detach, tree),
        ALONE: lambda: [torch.Tensor.detach(tensor) for tensor in tensors],
    }


def _same(leaf: Any) -> Any:
    return leaf


def _is_shard(leaf: Any) -> bool:
    return isinstance(leaf, st.ShardedTensor)


def _check(tree: Any) -> None:
    """Raise unless everybody who is compared does the same."""
    made = _actions(tree)
    ours, plain, asked, kept = (made[name]() for name in (OURS, PLAIN, ASKED, KEPT))
    if not ours == plain == asked == kept == tree or ours is tree:
        raise ValueError("the maps differ")
    new = made[NEW]()
    for one, other in zip(_leaves(tree), _leaves(new), strict=True):
        if one.without_data() != other.without_data() or one.data is other.data or not one.data.equal(other.data):
            raise ValueError(f"map_data: {one.key} is another")


def _leaves(tree: Any) -> list[st.ShardedTensor]:
    return optree.tree_leaves(tree, none_is_leaf=True)


def _rows(tree: str, seconds: Seconds, leaves: int) -> list[Bar]:
    each = {name: 1e6 * median(values) / leaves for name, values in seconds.items()}
    compared = [
        Bar(f"{OURS}, {tree}", other, each[OURS], each[other], ratio(seconds, OURS, other), MOST_RATIO, UNIT)
        for other in (PLAIN, ASKED)
    ]
    note = "figure: µs a leaf"
    return [
        *compared,
        Bar(f"{KEPT}, {tree}", "", each[KEPT], None, each[KEPT], MOST_MICROSECONDS, UNIT, note),
        Bar(f"{NEW}, {tree}", ALONE, each[NEW], each[ALONE], each[NEW], MOST_MICROSECONDS, UNIT, f"{note}; detach"),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark by its command."""
    return run(bars, arguments, "benchmarks.maps", __doc__)


if __name__ == "__main__":
    sys.exit(main())

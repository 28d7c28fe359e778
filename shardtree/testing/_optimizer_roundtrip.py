"""The law of optimizer states: converted, saved, loaded in another layout and taken back, they are what they were."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..checkpoint import load, save
from ..errors import render_path
from ..layouts import object_columns, shard_columns, sharding_problems
from ..mapping import ShardedObject, ShardedTensor
from ..storage import Directory, MemoryStorage
from ..transforms import (
    optim_state_by_id,
    optim_state_by_name,
    optim_state_to_sharding_state,
    sharding_state_to_optim_state,
)
from ..trees import diff, leaves_with_paths
from ..world import World, simulate
from ._layout import Layout
from ._optimizer_states import OptimizerState, rank_optimizer


def check_optimizer_roundtrip(
    state: OptimizerState,
    save_layout: Mapping[str, Layout],
    load_layout: Mapping[str, Layout],
    *,
    by_name: bool = False,
    directory: Directory | None = None,
    convert: Callable[..., Any] = optim_state_to_sharding_state,
    back: Callable[..., Any] = sharding_state_to_optim_state,
) -> None:
    """Raise unless an optimizer's state that is saved in one layout and loaded in the other is what it was.

    Every rank converts its own state dict, and gets back the one that it would have in the other layout, bit for bit;
    of what there is once for each parameter, exactly one rank's is the main replica. Each layout is run on as many
    simulated ranks as it has.

    Args:
        state: the global values.
        save_layout: for each parameter's name, how it lies when it is saved; a rank has at most one piece of each.
        load_layout: likewise when it is loaded.
        by_name: whether state dicts are by names rather than ids.
        directory: where the checkpoint goes; memory by default.
        convert: as `optim_state_to_sharding_state`.
        back: as `sharding_state_to_optim_state`.

    Raises:
        AssertionError: names the rank and the state that differs, or what isn't held once.

    Examples:
        >>> import torch
        >>> from shardtree.testing import even_optimizer_layout
        >>> moments, groups = {"w": {"exp_avg": torch.arange(12)}}, ({"lr": 0.1, "params": ["w"]},)
        >>> state = OptimizerState({"w": torch.zeros(12)}, {"w": 0}, moments, {"w": {}}, {"w": {"step": (3,)}}, groups)
        >>> check_optimizer_roundtrip(state, even_optimizer_layout(state, 4), even_optimizer_layout(state, 3))
    """
    place = MemoryStorage() if directory is None else directory

    def tree_of(layout: Mapping[str, Layout], rank: int) -> Any:
        state_dict, params, names = rank_optimizer(state, layout, rank)
        if by_name:
            return convert(optim_state_by_name(state_dict, names), {name: params[n] for n, name in names.items()})
        return convert(state_dict, params)

    def load_rank(world: World) -> Any:
        loaded = back(load({"o": tree_of(load_layout, world.rank)}, place, world=world)["o"])
        return optim_state_by_id(loaded, rank_optimizer(state, load_layout, world.rank)[2]) if by_name else loaded

    trees = [tree_of(save_layout, rank) for rank in range(_ranks(save_layout))]
    check_held_once(trees)
    simulate(len(trees), lambda world: save({"o": trees[world.rank]}, place, world=world))
    for rank, found in enumerate(simulate(_ranks(load_layout), load_rank)):
        check_same_state(found, rank_optimizer(state, load_layout, rank)[0], rank)


def check_held_once(trees: list[Any]) -> None:
    """Raise unless, of all that ranks hold, each element and each object has exactly one main replica.

    Args:
        trees: each rank's, without factories.

    Raises:
        AssertionError: names what isn't.

    Examples:
        >>> import torch
        >>> check_held_once([{"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, n, 2))} for n in range(2)])
    """
    leaves = [[leaf for _, leaf in leaves_with_paths(tree)] for tree in trees]
    tensors = [
        shard_columns([leaf for leaf in own if isinstance(leaf, ShardedTensor)], n) for n, own in enumerate(leaves)
    ]
    objects = [
        object_columns([leaf for leaf in own if isinstance(leaf, ShardedObject)], n) for n, own in enumerate(leaves)
    ]
    problems = sharding_problems(tensors, objects)
    assert not problems, "not held once\n  " + "\n  ".join(map(str, problems))


def check_same_state(found: Any, expected: Any, rank: int) -> None:
    """Raise unless a state dict is the one that is expected, bit for bit; empty states don't count.

    Args:
        found: what a rank got.
        expected: what it should have.
        rank: which.

    Raises:
        AssertionError: names the first places that differ.

    Examples:
        >>> check_same_state({"state": {0: {"step": 1}}}, {"state": {0: {"step": 1}}}, 0)
    """
    wrong = diff(found, expected)
    shown = {"missing": wrong.only_right, "unexpected": wrong.only_left, "different": wrong.mismatch}
    lines = [f"{what} {render_path(path)}" for what, paths in shown.items() for path in paths[:3]]
    assert not wrong, f"rank {rank}: the optimizer's state isn't what it was\n  " + "\n  ".join(lines)


def _ranks(layout: Mapping[str, Layout]) -> int:
    return next(iter(layout.values())).ranks

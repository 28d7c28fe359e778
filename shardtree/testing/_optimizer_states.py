"""Optimizer states: global values, each rank's state dict in a layout, and the law of round trips."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from hypothesis import strategies as st

from ..core.layouts import object_columns, shard_columns, sharding_problems
from ..core.mapping import ShardedObject, ShardedTensor
from ..core.trees import diff, leaves_with_paths
from ..errors import render_path
from ..live import simulate
from ..optim import optim_state_by_id, optim_state_by_name, optim_state_to_sharding_state, sharding_state_to_optim_state
from ..shell.checkpoint import load, save
from ..shell.storage import Directory
from ..shell.world import World
from ..stores import MemoryStorage
from ._layouts import Layout, cut, even_layout, layouts, prependable
from ._states import ranks_of
from ._tensors import PRINTABLE_DTYPES, random_bits, shapes

_NAMES = ("w", "b", "layers.0.w", "layers.w", "exp_avg.w")
_MOMENTS, _NUMBERS, _VALUES = ("exp_avg", "exp_avg_sq", "w"), ("step", "mu_product"), ("count", "momentum_buffer")
_SIZES = (2, 1, 3, 4, 0)
_MOST_PIECES = 8
_PYTHON = st.none() | st.integers() | st.booleans() | st.floats() | st.just("done")
_HYPER = st.fixed_dictionaries(
    {"lr": st.floats(0, 1), "betas": st.tuples(st.floats(0, 1), st.floats(0, 1))},
    optional={"weight_decay": st.floats(0, 1), "fused": st.none(), "layer": st.text("ab", max_size=2)},
)


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerState:
    """The global state of an optimizer: the oracle for conversions and loads.

    Each index along prepended axes is a separate parameter, on a separate rank.

    Attributes:
        params: Global parameters by name, in order.
        prepended: Number of prepended leading axes of each parameter.
        moments: Moments by parameter and state key: tensors of the parameter's global shape and any dtype.
        numbers: Numbers by parameter and state key: tensors of the shape of the prepended axes, or scalars.
        values: Python values by parameter and state key, one for each index along prepended axes.
        groups: Hyperparameters of each group, with the names of its parameters as ``params``.
    """

    params: Mapping[str, torch.Tensor]
    prepended: Mapping[str, int]
    moments: Mapping[str, Mapping[str, torch.Tensor]]
    numbers: Mapping[str, Mapping[str, torch.Tensor]]
    values: Mapping[str, Mapping[str, tuple[Any, ...]]]
    groups: tuple[Mapping[str, Any], ...]


@st.composite
def optimizer_states(draw: st.DrawFn, *, max_params: int = 3) -> OptimizerState:
    """Return a strategy for optimizer states: moments of any dtype, numbers, Python values, groups.

    Parameters often have the same shape. A state of the wrong parameter then has the right shape but wrong values.

    Args:
        draw: Draw function that Hypothesis's `composite` passes. Callers omit it, and get a strategy.
        max_params: Upper bound on the number of parameters.

    Examples:
        >>> from hypothesis import given, settings
        >>> @settings(max_examples=3)
        ... @given(optimizer_states())
        ... def check_names(state):
        ...     assert {name for group in state.groups for name in group["params"]} == state.params.keys()
        >>> check_names()
    """
    names = _NAMES[: draw(st.integers(1, max_params))]
    same = draw(shapes(max_axes=3, sizes=_SIZES))
    sizes = {name: draw(st.just(same) | shapes(max_axes=3, sizes=_SIZES)) for name in names}
    prepended = {name: draw(st.integers(0, prependable(sizes[name], _MOST_PIECES // 2))) for name in names}
    fronts = {name: sizes[name][: prepended[name]] for name in names}

    def tensors(shape: tuple[int, ...]) -> st.SearchStrategy[torch.Tensor]:
        kinds = st.sampled_from([torch.float32, *PRINTABLE_DTYPES])
        return st.builds(random_bits, st.just(shape), kinds, st.integers(0, 2**16))

    def some(keys: tuple[str, ...], values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
        return st.dictionaries(st.sampled_from(keys), values, max_size=2)

    return OptimizerState(
        {name: draw(tensors(sizes[name])) for name in names},
        prepended,
        {name: draw(some(_MOMENTS, tensors(sizes[name]))) for name in names},
        {name: draw(some(_NUMBERS, tensors(fronts[name]))) for name in names},
        {name: draw(some(_VALUES, st.tuples(*[_PYTHON] * prod(fronts[name])))) for name in names},
        draw(_groups(names)),
    )


@st.composite
def _groups(draw: st.DrawFn, names: tuple[str, ...]) -> tuple[Mapping[str, Any], ...]:
    count = draw(st.integers(1, len(names)))
    numbers = [draw(st.integers(0, count - 1)) for _ in names]
    members = [[name for name, number in zip(names, numbers, strict=True) if number == group] for group in range(count)]
    return tuple({**draw(_HYPER), "params": draw(st.permutations(parameters))} for parameters in members)


@st.composite
def optimizer_layouts(draw: st.DrawFn, state: OptimizerState) -> dict[str, Layout]:
    """Return a strategy for layouts of an optimizer's parameters, with at most one piece of each on a rank.

    An optimizer has one tensor for each parameter, so a rank has one shard. Some ranks lack some parameters, as with
    pipeline parallelism.

    Args:
        draw: Draw function that Hypothesis's `composite` passes. Callers omit it, and get a strategy.
        state: The optimizer state.

    Examples:
        >>> from hypothesis import given, settings
        >>> state = OptimizerState({"w": torch.zeros(4)}, {"w": 0}, {"w": {}}, {"w": {}}, {"w": {}}, ())
        >>> @settings(max_examples=3)
        ... @given(optimizer_layouts(state))
        ... def check_pieces(layout):
        ...     assert [piece.rank for piece in layout["w"].pieces] == list(range(layout["w"].ranks))
        >>> check_pieces()
    """
    layout_of = {
        name: draw(_layout_of_pieces(tuple(param.shape), state.prepended[name])) for name, param in state.params.items()
    }
    ranks = max(len(pieces.pieces) for pieces in layout_of.values())
    return {name: replace(layout, ranks=ranks) for name, layout in layout_of.items()}


@st.composite
def _layout_of_pieces(draw: st.DrawFn, shape: tuple[int, ...], prepended: int) -> Layout:
    """Return a strategy for layouts with each piece on a separate rank.

    Args:
        draw: Draw function that Hypothesis's `composite` passes. Callers omit it, and get a strategy.
        shape: Shape of the parameter.
        prepended: Number of prepended leading axes.
    """
    layout = draw(layouts(shape, 3, prepended=prepended).filter(_is_unambiguous))
    pieces = tuple(replace(piece, rank=rank) for rank, piece in enumerate(layout.pieces))
    return replace(layout, ranks=len(pieces), pieces=pieces)


def _is_unambiguous(layout: Layout) -> bool:
    """Return whether a layout has few pieces, and a parameter's shards show how its optimizer state is stored.

    Two kinds of layouts are excluded: several main pieces of a tensor without elements, which look alike; and flat
    ranges of a tensor without axes, whose moments are stored like single numbers, such as step counts.
    """
    mains = sum(piece.replica in (0, (0, 0)) for piece in layout.pieces)
    front, local = layout.global_shape[: layout.prepended], layout.global_shape[layout.prepended :]
    once = prod(local) > 0 or mains == prod(front)
    has_flat = any(piece.flat is not None for piece in layout.pieces)
    return len(layout.pieces) <= _MOST_PIECES and once and (bool(local) or not has_flat)


def even_optimizer_layout(state: OptimizerState, ranks: int) -> dict[str, Layout]:
    """Return the layout that cuts the first axis of each parameter evenly over the ranks.

    A parameter that cannot be cut evenly is replicated.

    Args:
        state: An optimizer state whose parameters have no prepended axes: its `prepended` is 0 for all of them.
        ranks: Number of ranks.

    Examples:
        >>> state = OptimizerState({"w": torch.zeros(4)}, {"w": 0}, {"w": {}}, {"w": {}}, {"w": {}}, ())
        >>> even_optimizer_layout(state, 2)["w"].pieces[1].offset
        (2,)
    """

    def layout_of(shape: tuple[int, ...]) -> Layout:
        return even_layout(shape, ranks, 0 if shape and shape[0] and shape[0] % ranks == 0 else None)

    return {name: layout_of(tuple(param.shape)) for name, param in state.params.items()}


def rank_optimizer(
    state: OptimizerState, layout: Mapping[str, Layout], rank: int
) -> tuple[dict[str, Any], dict[int, ShardedTensor], dict[int, str]]:
    """Return a rank's part of an optimizer, with torch's integer ids of parameters.

    Args:
        state: The global values.
        layout: Layout of each parameter, by name; at most one piece on each rank.
        rank: Index of the rank.

    Returns:
        The state dict, the parameters as shards by id, and the names of the parameters by id.

    Examples:
        >>> whole = {"w": {"exp_avg": torch.arange(4)}}
        >>> groups = ({"lr": 0.1, "params": ["w"]},)
        >>> state = OptimizerState({"w": torch.zeros(4)}, {"w": 0}, whole, {"w": {}}, {"w": {"count": (3,)}}, groups)
        >>> state_dict, params, names = rank_optimizer(state, even_optimizer_layout(state, 2), 1)
        >>> state_dict["state"][0], params[0].global_offset, names
        ({'exp_avg': tensor([2, 3]), 'count': 3}, (2,), {0: 'w'})
    """
    # Ids are indices in the rank's own groups, as torch numbers them: with pipelines they differ from rank to rank.
    mine = {name for name in state.params if any(piece.rank == rank for piece in layout[name].pieces)}
    order = [name for group in state.groups for name in group["params"] if name in mine]
    ids = {name: number for number, name in enumerate(order)}
    groups = [{**group, "params": [ids[name] for name in group["params"] if name in mine]} for group in state.groups]
    states = {ids[name]: part for name in order if (part := _rank_states(state, layout[name], name, rank))}
    params = {ids[name]: cut(layout[name], name, state.params[name], rank)[0] for name in order}
    return {"state": states, "param_groups": groups}, params, {ids[name]: name for name in order}


def _rank_states(state: OptimizerState, layout: Layout, name: str, rank: int) -> dict[str, Any]:
    """Return a rank's moments, numbers and Python values of one parameter, by state key."""
    front = layout.prepended
    [piece] = [piece for piece in layout.pieces if piece.rank == rank]
    place = piece.offset[:front]
    number = sum(index * prod(layout.global_shape[axis + 1 : front]) for axis, index in enumerate(place))
    moments = {key: cut(layout, name, whole, rank)[0].data for key, whole in state.moments[name].items()}
    numbers = {key: whole[place] if front else whole for key, whole in state.numbers[name].items()}
    values = {key: cells[number] for key, cells in state.values[name].items()}
    return {**moments, **numbers, **values}


# The law of round trips.


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
    """Raise unless an optimizer state that is saved in one layout and loaded in another is unchanged.

    Every rank converts its own state dict, and must get back the one that it would have in the other layout, bit for
    bit; each element and object must have exactly one main replica. Each layout is run on simulated ranks.

    Args:
        state: The global values.
        save_layout: Layout of each parameter while saving, by name; a rank has at most one piece of each parameter.
        load_layout: Layout of each parameter while loading, by name.
        by_name: Whether state dicts use names rather than ids.
        directory: Place of the checkpoint; memory by default.
        convert: Function under test for saves, such as `optim_state_to_sharding_state`.
        back: Function under test for loads, such as `sharding_state_to_optim_state`.

    Raises:
        AssertionError: A state differs, or an element or object hasn't exactly one main replica; the error names which.

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
        tree = back(load({"o": tree_of(load_layout, world.rank)}, place, world=world)["o"])
        return optim_state_by_id(tree, rank_optimizer(state, load_layout, world.rank)[2]) if by_name else tree

    trees = [tree_of(save_layout, rank) for rank in range(ranks_of(save_layout))]
    # Checked before the save, which would report this fault as its own integrity error, without the law's name.
    check_held_once(trees)
    simulate(len(trees), lambda world: save({"o": trees[world.rank]}, place, world=world))
    for rank, found in enumerate(simulate(ranks_of(load_layout), load_rank)):
        check_same_state(found, rank_optimizer(state, load_layout, rank)[0], rank)


def check_held_once(trees: list[Any]) -> None:
    """Raise unless each element and each object has exactly one main replica over all ranks.

    Args:
        trees: Trees of all ranks, without factories.

    Raises:
        AssertionError: An element or object has no main replica, or several; the error names which.

    Examples:
        >>> import torch
        >>> check_held_once([{"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, n, 2))} for n in range(2)])
    """
    tensors, objects = [], []
    for rank, tree in enumerate(trees):
        leaves = [leaf for _, leaf in leaves_with_paths(tree)]
        tensors.append(shard_columns([leaf for leaf in leaves if isinstance(leaf, ShardedTensor)], rank))
        objects.append(object_columns([leaf for leaf in leaves if isinstance(leaf, ShardedObject)], rank))
    problems = sharding_problems(tensors, objects)
    assert not problems, "not exactly one main replica each\n  " + "\n  ".join(map(str, problems))


def check_same_state(found: Any, expected: Any, rank: int) -> None:
    """Raise unless a state dict equals the expected one, bit for bit; empty states are ignored.

    Args:
        found: A rank's state dict.
        expected: Expected state dict.
        rank: Index of the rank, for the message.

    Raises:
        AssertionError: The state dicts differ; the error names the first paths that differ.

    Examples:
        >>> check_same_state({"state": {0: {"step": 1}}}, {"state": {0: {"step": 1}}}, 0)
    """
    wrong = diff(found, expected)
    kinds = {"missing": wrong.only_right, "unexpected": wrong.only_left, "different": wrong.mismatch}
    lines = [f"{what} {render_path(path)}" for what, paths in kinds.items() for path in paths[:3]]
    assert not wrong, f"rank {rank}: the optimizer's state has changed\n  " + "\n  ".join(lines)

"""A map over the states of an optimizer, which passes each state together with its parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..core.mapping import ShardedBase
from ..core.trees import check_function, leaves_with_paths, path_key
from ..errors import TreeError, TreePath, error_text
from ._at import is_tensor
from ._by_key import map_with_path
from ._state_keys import state_keys
from ._states import by_number

_IN_OPTIMIZER = "optimizer.state."
"""Prefix that marks keys as an optimizer's, so that their other parts needn't include a known name of a state."""


def map_params(f: Callable[[Any, Any], Any], optimizer_state: Any, params: Any) -> Any:
    """Return an optimizer's state with `f` applied to each state of a parameter, such as a moment; other values stay.

    A state's key contains the key of its parameter. First parts of that key may be left out, as in `keep_layers`:
    ``opt.0.mu.layers.2.w`` belongs to ``layers.2.w`` or ``model.layers.2.w``. The key of a plain value is its path.

    Args:
        f: Function of a state and its parameter, which are leaves as in `map_shards`. A parameter's own numbers, such
            as its step count, are states too.
        optimizer_state: Any tree whose states have the parameters' names, such as optax's. States that are stored
            under the parameters' numbers get names from ``LoadOptions(parameter_names=[...])``.
        params: The tree with all parameters of the optimizer.

    Raises:
        TreeError: A tensor's parameter can't be found, or a state is ambiguous; the error names the keys.
        Exception: An error of `f`, with the leaf's path in a note.

    Examples:
        >>> import torch
        >>> state = {"mu": {"w": torch.ones(2)}, "nu": {"w": torch.ones(2)}, "count": 3}
        >>> map_params(lambda moment, weight: moment * weight, state, {"w": torch.full((2,), 5.0)})
        {'mu': {'w': tensor([5., 5.])}, 'nu': {'w': tensor([5., 5.])}, 'count': 3}

    References:
        optax.tree.map_params.
    """
    check_function("map_params", "f", f)
    parameters = {_key(path, leaf): leaf for path, leaf in leaves_with_paths(params) if is_tensor(leaf)}
    owners = _owners(leaves_with_paths(optimizer_state), parameters)

    def on_leaf(path: TreePath, leaf: Any) -> Any:
        return f(leaf, parameters[owners[path]]) if path in owners else leaf

    return map_with_path(on_leaf, optimizer_state)


def _key(path: TreePath, leaf: Any) -> str:
    return leaf.key if isinstance(leaf, ShardedBase) else path_key(path)


def _owners(leaves: list[tuple[TreePath, Any]], parameters: Mapping[str, Any]) -> dict[TreePath, str]:
    """Return the key of the parameter that each state belongs to, by the state's path."""
    keys = {path: _IN_OPTIMIZER + _key(path, leaf) for path, leaf in leaves}
    states, unclear = state_keys([*parameters], {*keys.values()})
    lines = []
    for path, leaf in leaves:
        key = keys[path]
        name, owners = key.removeprefix(_IN_OPTIMIZER), unclear.get(key, ())
        if owners or (key not in states and (by_number(name) or (is_tensor(leaf) and _axes(leaf)))):
            owner = f"may belong to {' or '.join(map(repr, owners))}" if owners else "belongs to no parameter"
            lines.append(f"{name!r}: {owner}")
    if lines:
        fix = "Remove them with `partition`, or name them after their parameters."
        heading = "map_params: states that cannot be related to a parameter"
        raise TreeError(error_text(heading, offenders=lines, fix=fix))
    return {path: states[key].parameter for path, key in keys.items() if key in states}


def _axes(leaf: Any) -> int:
    return len(getattr(leaf, "global_shape", getattr(leaf, "shape", ())))

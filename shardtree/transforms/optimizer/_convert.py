"""An optimizer's state dict as a sharded tree, by the ids or the names of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import TreeError, error_text
from ...mapping import ShardedStateDict, StateDict
from ._arguments import check_params, excluded
from ._groups import stored_groups
from ._leaf import RULES_FIX, OptimizerRules, check_rules, problem_of, rule_of, state_leaf, state_place
from ._state_dict import ParamId, ShardedParam, States, are_names, groups_of, members, states_of


def optim_state_to_sharding_state(
    optim_state_dict: StateDict,
    id_to_sharded_param_map: Mapping[Any, ShardedParam],
    exclude_keys: Sequence[str] = (),
    *,
    rules: OptimizerRules | None = None,
) -> ShardedStateDict:
    """Return an optimizer's state dict as a sharded tree: states lie as their parameters do. Nothing is changed.

    - A tensor of its parameter's shape becomes the parameter's shard, or its factory, with that tensor as data, under
      the key ``optimizer.state.<state key>.<parameter's key>``.
    - A number (a tensor without axes, an int, None) is stored once for each parameter: the main replica is that of
      the one rank that has the parameter's first element. It comes back as what it was.
    - Anything else needs a rule.
    - Hyperparameters of groups stay plain values. Which parameters a group has isn't stored where these are numbered:
      then group i gets the hyperparameters of the stored group i. Named parameters keep their own: each tells which
      group it was in, under ``optimizer.param_group.<parameter's key>``; see `sharding_state_to_optim_state`. All
      ranks have the same groups, also those of which they have no parameters.

    Args:
        optim_state_dict: what ``optimizer.state_dict()`` gives, or the same by names (`optim_state_by_name`, or torch's
            ``get_optimizer_state_dict``). What else is in it stays.
        id_to_sharded_param_map: sharded parameters by id (`get_param_id_to_sharded_param_map`) or by name
            (`sharded_params_by_name`). May have more than the optimizer.
        exclude_keys: state keys that are left out. One text is one key.
        rules: for states of other shapes, by patterns of state keys, or of ``<state key>.<parameter's key>`` (``*``
            stands for one part between dots, ``**`` for any number); the first that fits counts, also for states
            that would need none.

    Returns:
        A new tree; tensors and hyperparameters are shared.

    Raises:
        TreeError: no parameter for an id or name, no rule for a state, a state key with a dot, or not an optimizer's
            state dict; names each.

    Examples:
        >>> import torch, shardtree as st
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        >>> weight.grad = torch.ones(2)
        >>> optimizer.step()
        >>> model = {"w": st.ShardedTensor.from_rank_offsets("w", weight, (0, 1, 4))}
        >>> params = st.get_param_id_to_sharded_param_map(model, optimizer)
        >>> tree = optim_state_to_sharding_state(optimizer.state_dict(), params)
        >>> tree["state"][0]["momentum_buffer"].key, tree["param_groups"][0]["lr"]
        ('optimizer.state.momentum_buffer.w', 0.1)

    References:
        megatron.core.dist_checkpointing.optimizer, megatron-core 0.16.1, which changes its argument.
    """
    doing = "optim_state_to_sharding_state"
    states = _kept(states_of(doing, optim_state_dict), excluded(doing, exclude_keys))
    groups = groups_of(doing, optim_state_dict["param_groups"])
    check_rules(doing, rules)
    named = are_names(doing, groups, states)
    check_known(doing, [*states, *(members(groups) if named else ())], id_to_sharded_param_map)
    _check_keys(doing, states, id_to_sharded_param_map)
    _check_shapes(doing, states, id_to_sharded_param_map, rules)
    state = {
        name: {key: state_leaf(id_to_sharded_param_map[name], key, value, rules) for key, value in own.items()}
        for name, own in states.items()
    }
    return {**optim_state_dict, "state": state, **stored_groups(groups, id_to_sharded_param_map, named=named)}


def _kept(states: States, left_out: set[Any]) -> States:
    return {name: {key: value for key, value in own.items() if key not in left_out} for name, own in states.items()}


def check_known(doing: str, names: Sequence[ParamId], params: Mapping[Any, ShardedParam]) -> None:
    """Raise unless there is a sharded parameter for each id or name.

    Raises:
        TreeError: names those without one.

    Examples:
        >>> check_known("save", [], {})
    """
    check_params(doing, params)
    lost = [repr(name) for name in dict.fromkeys(names) if name not in params]
    if lost:
        expected = f"one of {len(params)} sharded parameters: {', '.join(map(repr, list(params)[:4]))}, ..."
        fix = (
            "Give the sharded tree of the whole model, with the model's own parameters as data (keep_vars=True), and "
            "the optimizer itself, so that ids are in its order."
        )
        what = f"{doing}: no sharded parameter for what the optimizer has"
        raise TreeError(error_text(what, offenders=lost, expected=expected, fix=fix))


def _check_keys(doing: str, states: States, params: Mapping[Any, ShardedParam]) -> None:
    """Raise where a stored key couldn't be told from that of another state of another parameter."""
    wrong = [
        state_place(name, params[name], key)
        for name, own in states.items()
        for key in own
        if not isinstance(key, str) or "." in key
    ]
    if wrong:
        fix = "In a checkpoint it would be another parameter's. Give it another key, or leave it out with exclude_keys."
        what = f"{doing}: state keys that aren't texts without dots"
        raise TreeError(error_text(what, offenders=wrong, fix=fix))


def _check_shapes(doing: str, states: States, params: Mapping[Any, ShardedParam], rules: OptimizerRules | None) -> None:
    problems = [
        problem
        for name, own in states.items()
        for key, value in own.items()
        if rule_of(rules, params[name], key) is None and (problem := problem_of(name, params[name], key, value))
    ]
    if problems:
        what = f"{doing}: states that aren't shaped like their parameters"
        raise TreeError(error_text(what, offenders=problems, fix=RULES_FIX))

"""Conversions of an optimizer's state dict: to a sharded tree and back, and between ids and names of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from ..core.mapping import ShardedStateDict, StateDict
from ..errors import TreeError, error_text
from ._groups import MEMBERS, Hyperparameters, arranged_groups, check_which, stored_groups
from ._leaf import (
    RULES_FIX,
    OptimizerRules,
    check_rules,
    items_of,
    list_item,
    problem_of,
    rule_of,
    state_leaf,
    state_place,
)
from ._state_dict import (
    Group,
    ParamId,
    ShardedParam,
    States,
    are_names,
    check_dict,
    check_params,
    excluded,
    groups_of,
    members,
    states_of,
)

# To a sharded tree.


def optim_state_to_sharding_state(
    optim_state_dict: StateDict,
    id_to_sharded_param_map: Mapping[Any, ShardedParam],
    exclude_keys: Sequence[str] = (),
    *,
    rules: OptimizerRules | None = None,
) -> ShardedStateDict:
    """Return an optimizer's state dict as a new sharded tree, in which each state is sharded like its parameter.

    - A tensor of its parameter's shape becomes the parameter's shard, or its factory, with that tensor as data, under
      the key ``optimizer.state.<state key>.<parameter's key>``.
    - A number (a tensor without axes, an int, None) is stored once for each parameter. Its main replica is on the rank
      that has the parameter's first element. A load returns the saved type: an int stays an int.
    - A list that contains tensors, such as SOAP's ``Q``, becomes a list of leaves with the state keys ``Q[0]``,
      ``Q[1]`` and so on.
    - Any other state needs a rule.
    - Hyperparameters of groups stay plain values. All ranks must have the same groups, even ranks that hold none of a
      group's parameters.
    - A group's list of parameters isn't stored. With numbered parameters, a load gives the hyperparameters of the
      stored group i to group i. With named parameters, the number of each parameter's group is stored under
      ``optimizer.param_group.<parameter's key>``, so that a load gives each parameter the hyperparameters that it had;
      see `sharding_state_to_optim_state`.

    Args:
        optim_state_dict: Result of ``optimizer.state_dict()``, or its form by names (`optim_state_by_name`, or torch's
            ``get_optimizer_state_dict``). Entries other than "state" and "param_groups" are kept as they are.
        id_to_sharded_param_map: Sharded parameters by id (`get_param_id_to_sharded_param_map`) or by name
            (`sharded_params_by_name`). Parameters that the optimizer doesn't have are ignored.
        exclude_keys: State keys to leave out; a single string is one key.
        rules: Rules by pattern, for states of other shapes. A pattern is compared with the state key and with
            ``<state key>.<parameter's key>``; ``*`` matches text without dots, ``**`` any text. The first rule whose
            pattern matches is used, even for a state that needs none.

    Returns:
        A new tree, which shares tensors and hyperparameters with the argument.

    Raises:
        TreeError: An id or name has no parameter, a state has no rule, a state key has a dot, or the argument isn't an
            optimizer's state dict; the error names each offender.

    Examples:
        >>> import torch, shardtree as st
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        >>> weight.grad = torch.ones(2)
        >>> optimizer.step()
        >>> model = {"w": st.ShardedTensor.from_rank_offsets("w", weight, (0, 1, 4))}
        >>> params = st.optim.get_param_id_to_sharded_param_map(model, optimizer)
        >>> tree = optim_state_to_sharding_state(optimizer.state_dict(), params)
        >>> tree["state"][0]["momentum_buffer"].key, tree["param_groups"][0]["lr"]
        ('optimizer.state.momentum_buffer.w', 0.1)

    References:
        megatron.core.dist_checkpointing.optimizer, megatron-core 0.16.1, which changes its argument.
    """
    doing = "optim_state_to_sharding_state"
    every, left_out = states_of(doing, optim_state_dict), excluded(doing, exclude_keys)
    states = {
        name: {key: value for key, value in states_by_key.items() if key not in left_out}
        for name, states_by_key in every.items()
    }
    groups = groups_of(doing, optim_state_dict["param_groups"])
    check_rules(doing, rules)
    by_name = are_names(doing, groups, states)
    check_known(doing, [*states, *(members(groups) if by_name else ())], id_to_sharded_param_map)
    _check_keys(doing, states, id_to_sharded_param_map)
    _check_shapes(doing, states, id_to_sharded_param_map, rules)
    state = {
        name: {
            key: _state_leaves(id_to_sharded_param_map[name], key, value, rules) for key, value in states_by_key.items()
        }
        for name, states_by_key in states.items()
    }
    return {**optim_state_dict, "state": state, **stored_groups(groups, id_to_sharded_param_map, named=by_name)}


def _state_leaves(param: ShardedParam, state_key: str, value: Any, rules: OptimizerRules | None) -> Any:
    """Return the leaf of a state; for a list with tensors, a list of leaves."""
    leaves = [state_leaf(param, key, item, rules) for key, item in items_of(state_key, value).items()]
    return leaves[0] if state_key in items_of(state_key, value) else leaves


def check_known(doing: str, names: Sequence[ParamId], params: Mapping[Any, ShardedParam]) -> None:
    """Raise an error unless a map has a sharded parameter for each of the optimizer's ids or names.

    Raises:
        TreeError: Some ids or names aren't in the map; the error names them.

    Examples:
        >>> check_known("save", [], {})
    """
    check_params(doing, params)
    wrong = [repr(name) for name in dict.fromkeys(names) if name not in params]
    if wrong:
        more = ", ..." if len(params) > 4 else ""
        expected = f"one of {len(params)} sharded parameters: {', '.join(map(repr, list(params)[:4]))}{more}"
        fix = (
            "Pass the sharded tree of the whole model, with the model's own parameters as data (keep_vars=True).\n"
            "  Ids must follow the optimizer's order, as those of `get_param_id_to_sharded_param_map` do."
        )
        heading = f"{doing}: the optimizer has parameters that the sharded tree lacks"
        raise TreeError(error_text(heading, offenders=wrong, expected=expected, fix=fix))


def _check_keys(doing: str, states: States, params: Mapping[Any, ShardedParam]) -> None:
    """Raise an error if a state key can't be stored: it isn't a string, contains a dot, or ends with ``[number]``."""
    wrong = [
        state_place(name, params[name], key)
        for name, states_by_key in states.items()
        for key in states_by_key
        if not isinstance(key, str) or "." in key or list_item(key)[1] is not None
    ]
    if wrong:
        fix = "Stored keys would be ambiguous: rename these state keys, or leave them out with exclude_keys."
        heading = f"{doing}: state keys that are not strings, contain a dot, or end like '[0]'"
        raise TreeError(error_text(heading, offenders=wrong, fix=fix))


def _check_shapes(doing: str, states: States, params: Mapping[Any, ShardedParam], rules: OptimizerRules | None) -> None:
    problems = [
        problem
        for name, own in states.items()
        for key, value in own.items()
        for item, part in items_of(key, value).items()
        if rule_of(rules, params[name], item) is None and (problem := problem_of(name, params[name], item, part))
    ]
    if problems:
        heading = f"{doing}: states that are not shaped like their parameters"
        raise TreeError(error_text(heading, offenders=problems, fix=RULES_FIX))


# Back to an optimizer's state dict.


def sharding_state_to_optim_state(loaded: StateDict, *, hyperparameters: Hyperparameters = "stored") -> StateDict:
    """Return a loaded sharded optimizer state as a state dict for the optimizer's `load_state_dict`.

    With ids, group i gets the hyperparameters of the stored group i, even if other parameters are in it now. With
    names, the groups are the optimizer's own, in its order; each gets the hyperparameters that its parameters had when
    they were saved.

    Args:
        loaded: Result of `load` for a tree of `optim_state_to_sharding_state` or `abstract_optim_state`.
        hyperparameters: "stored" for the saved hyperparameters; "own", only with names, for the hyperparameters that
            the optimizer's state dict had when the tree to load was made.

    Returns:
        A state dict by ids or by names, like the state dict from which the tree was made; `optim_state_by_id` turns
        names into ids.

    Raises:
        TreeError: Parameters that form one group now had different hyperparameters; a state's parameter is in no group;
            groups are missing; or "own" is requested by ids. The error names each offender.

    Examples:
        >>> import torch, shardtree as st
        >>> params = {name: st.ShardedTensor.from_rank_offsets(name, torch.zeros(2)) for name in ("b", "w")}
        >>> groups = [{"lr": 0.1, "params": ["w"]}, {"lr": 0.2, "params": ["b"]}]
        >>> saved = st.optim.optim_state_to_sharding_state({"state": {}, "param_groups": groups}, params)
        >>> storage = st.storage.MemoryStorage()
        >>> st.save({"o": saved}, storage)
        >>> fresh = {"state": {}, "param_groups": [{"lr": 0.0, "params": ["b"]}, {"lr": 0.0, "params": ["w"]}]}
        >>> loaded = st.load({"o": st.optim.optim_state_to_sharding_state(fresh, params)}, storage)
        >>> sharding_state_to_optim_state(loaded["o"])["param_groups"]
        [{'lr': 0.2, 'params': ['b']}, {'lr': 0.1, 'params': ['w']}]
    """
    doing = "sharding_state_to_optim_state"
    states = states_of(doing, {"state": {}, **loaded} if isinstance(loaded, Mapping) else loaded)
    # Only a tree by names has the optimizer's own groups.
    if "own_param_groups" in loaded:
        own_groups = groups_of(doing, loaded["own_param_groups"])
        groups = arranged_groups(
            doing, loaded["param_groups"], loaded.get("param_group_of", {}), own_groups, hyperparameters
        )
    else:
        check_which(doing, hyperparameters)
        # Ids are positions in groups, so only the stored groups are known.
        if hyperparameters == "own":
            heading = f"{doing}: hyperparameters='own' needs parameters by names, and these are numbered"
            fix = (
                "Pass hyperparameters='stored'; then copy the hyperparameters of `optimizer.state_dict()` into the "
                "groups of the returned state dict.\n  For new checkpoints, save what `optim_state_by_name` returns."
            )
            raise TreeError(error_text(heading, fix=fix))
        groups = [dict(group) for group in groups_of(doing, loaded["param_groups"])]
    _check_members(doing, states, groups)
    others = {key: value for key, value in loaded.items() if key not in {"param_group_of", "own_param_groups"}}
    return {**others, "state": {name: dict(state) for name, state in states.items()}, "param_groups": groups}


def regroup_optim_state(
    optim_state_dict: StateDict, param_groups: Sequence[Group], *, hyperparameters: Hyperparameters = "stored"
) -> StateDict:
    """Return a state dict by names, with its parameters rearranged into other groups.

    torch matches states with parameters by their positions in the groups. If an optimizer groups or orders its
    parameters differently from the state dict, call this function before the optimizer loads it.

    Args:
        optim_state_dict: State dict by names.
        param_groups: Groups of names, such as those of ``optim_state_by_name(optimizer.state_dict(), names)``.
        hyperparameters: "stored" for the hyperparameters that the parameters had, "own" for the hyperparameters in
            `param_groups`.

    Raises:
        TreeError: Parameters of one new group had different hyperparameters, a parameter has no old group, or a
            parameter with states has no new group.

    Examples:
        >>> groups = [{"lr": 1, "params": ["w"]}, {"lr": 2, "params": ["b"]}]
        >>> state = {"state": {"w": {"step": 1}}, "param_groups": groups}
        >>> regroup_optim_state(state, [{"params": ["b"]}, {"params": ["w"]}])["param_groups"]
        [{'lr': 2, 'params': ['b']}, {'lr': 1, 'params': ['w']}]
    """
    doing = "regroup_optim_state"
    states, old = states_of(doing, optim_state_dict), groups_of(doing, optim_state_dict["param_groups"])
    own = groups_of(doing, param_groups)
    group_of = {name: number for number, group in enumerate(old) for name in group["params"]}
    groups = arranged_groups(doing, old, group_of, own, hyperparameters)
    _check_members(doing, states, groups)
    return {**optim_state_dict, "param_groups": groups}


def _check_members(doing: str, states: States, groups: Sequence[Group]) -> None:
    unknown = [repr(name) for name in states if name not in set(members(groups))]
    if unknown:
        fix = f"List these parameters under {MEMBERS[0]!r} in one of the groups, or leave out their states."
        raise TreeError(error_text(f"{doing}: states of parameters that are in no group", offenders=unknown, fix=fix))


# Between ids and names.

_MAP = "{id: name}"


def optim_state_by_name(optim_state_dict: StateDict, id_to_name: Mapping[int, str]) -> StateDict:
    """Return a state dict whose parameters are named, from one whose parameters are numbered; values are shared.

    Args:
        optim_state_dict: Result of ``optimizer.state_dict()``.
        id_to_name: Result of `get_param_id_to_name_map`.

    Raises:
        TreeError: An id has no name, two ids have one name, or parameters are named already; the error names each.

    Examples:
        >>> state = {"state": {0: {"step": 3}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
        >>> optim_state_by_name(state, {0: "w", 1: "b"})
        {'state': {'w': {'step': 3}}, 'param_groups': [{'lr': 0.1, 'params': ['w', 'b']}]}
    """
    doing = "optim_state_by_name"
    check_dict(doing, "id_to_name", id_to_name, _MAP, str)
    return _relabel(doing, optim_state_dict, id_to_name, by_name=False)


def optim_state_by_id(optim_state_dict: StateDict, id_to_name: Mapping[int, str]) -> StateDict:
    """Return a state dict whose parameters are numbered, from one whose parameters are named; values are shared.

    torch matches states with parameters by position, so the groups must list the parameters in the order of their ids.
    If they don't, call `regroup_optim_state` first.

    Args:
        optim_state_dict: State dict by names.
        id_to_name: Parameter names by the optimizer's ids, from `get_param_id_to_name_map`.

    Raises:
        TreeError: A name has no id, groups are in another order or lack a parameter, or parameters are numbered
            already; the error names each.

    Examples:
        >>> state = {"state": {"w": {"step": 3}}, "param_groups": [{"lr": 0.1, "params": ["w", "b"]}]}
        >>> optim_state_by_id(state, {0: "w", 1: "b"})
        {'state': {0: {'step': 3}}, 'param_groups': [{'lr': 0.1, 'params': [0, 1]}]}
    """
    doing = "optim_state_by_id"
    check_dict(doing, "id_to_name", id_to_name, _MAP, str)
    ids = {name: number for number, name in id_to_name.items()}
    # torch's `load_state_dict` ignores the ids and goes by order, so another order would mix up states silently:
    # https://github.com/pytorch/pytorch/issues/1489
    new = _relabel(doing, optim_state_dict, ids, by_name=True)
    order: list[Any] = members(new["param_groups"])
    if order != sorted(id_to_name):
        wrong = [
            f"position {place}: {_name_text(id_to_name, here)}, expected {_name_text(id_to_name, should)}"
            for place, (here, should) in enumerate(zip_longest(order, sorted(id_to_name)))
            if here != should
        ]
        heading = f"{doing}: the groups list the parameters in another order than the optimizer"
        raise TreeError(error_text(heading, offenders=wrong, fix="Arrange them with `regroup_optim_state` first."))
    return new


def _name_text(id_to_name: Mapping[int, str], number: int | None) -> str:
    return "nothing" if number is None else repr(id_to_name[number])


def _relabel(doing: str, optim_state_dict: StateDict, labels: Mapping[Any, Any], *, by_name: bool) -> StateDict:
    """Return a state dict with ids replaced by names, or names by ids.

    Args:
        doing: Name of the operation in error messages.
        optim_state_dict: State dict to convert.
        labels: New name by old id, or new id by old name, of each parameter.
        by_name: Whether `optim_state_dict` has names, to be replaced by ids.
    """
    states = states_of(doing, optim_state_dict)
    groups = groups_of(doing, optim_state_dict["param_groups"])
    if members(groups) and are_names(doing, groups, states) is not by_name:
        found, expected = ("ids", "names") if by_name else ("names", "ids")
        heading = f"{doing}: the state dict lists parameters by {found} already"
        fix = "Use this state dict as it is: it needs no conversion."
        raise TreeError(error_text(heading, found=found, expected=expected, fix=fix))
    used = dict.fromkeys([*members(groups), *states])
    wrong = [f"{label!r} is not in id_to_name" for label in used if label not in labels]
    new = [labels[label] for label in used if label in labels]
    wrong += [f"{label!r} is given to several parameters" for label in dict.fromkeys(new) if new.count(label) > 1]
    if wrong:
        fix = "Make id_to_name with `get_param_id_to_name_map` from this optimizer and its model."
        raise TreeError(error_text(f"{doing}: id_to_name does not fit the parameters", offenders=wrong, fix=fix))
    new_groups = [{**group, "params": [labels[label] for label in group["params"]]} for group in groups]
    state = {labels[label]: entries for label, entries in states.items()}
    return {**optim_state_dict, "state": state, "param_groups": new_groups}

"""Targets for an optimizer that has no states yet: sharded states without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from ..core.mapping import ShardedObject, ShardedStateDict, ShardedTensor, ShardedTensorFactory, StateDict
from ..core.trees import map_shards
from ..errors import TreeError, error_text, render_path
from ._convert import check_known, optim_state_to_sharding_state
from ._groups import GROUP_PREFIX, stored_groups
from ._leaf import PREFIX, RULES_FIX, OptimizerRules, check_rules, list_item, moment_shape, rule_of, state_leaf
from ._per_parameter import built_shards, per_parameter
from ._state_dict import ShardedParam, are_names, check_dict, excluded, groups_of, members, states_of

Metadata = Mapping[str, ShardedTensor | ShardedObject]
_Stored = Mapping[str, Mapping[str, ShardedTensor | ShardedObject]]  # parameter's key -> state key -> stored leaf


def abstract_optim_state(
    optim_state_dict: StateDict,
    id_to_sharded_param_map: Mapping[Any, ShardedParam],
    template: Mapping[str, Any],
    *,
    rules: OptimizerRules | None = None,
) -> ShardedStateDict:
    """Return the target with which an optimizer without states loads a checkpoint, made from a template of its states.

    Args:
        optim_state_dict: State dict of the fresh optimizer, for its groups; its states are ignored.
        id_to_sharded_param_map: Sharded parameters by id or name, as for `optim_state_to_sharding_state`.
        template: Description of each state by state key: a dtype, for a tensor shaped like the parameter; a tensor
            without axes or a Python value, for a state that exists once for each parameter; or a function from a
            sharded parameter to a tensor (on the meta device, for example), for other shapes, which need a rule.
        rules: Rules for states of other shapes, as for `optim_state_to_sharding_state`.

    Raises:
        TreeError: The states or parameters are invalid, as in `optim_state_to_sharding_state`.

    Examples:
        >>> weight = ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 1, 4))
        >>> fresh = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        >>> template = {"step": torch.tensor(0.0), "exp_avg": torch.float32}
        >>> abstract_optim_state(fresh, {0: weight}, template)["state"][0]["exp_avg"]
        ShardedTensor(key='optimizer.state.exp_avg.w', data=None, dtype=torch.float32, ...)
    """
    doing = "abstract_optim_state"
    states_of(doing, optim_state_dict)
    check_dict(doing, "template", template, "{state key: dtype, tensor without axes, value or function}")
    names = members(groups_of(doing, optim_state_dict["param_groups"]))
    check_known(doing, names, id_to_sharded_param_map)
    states = {
        name: {key: _template_state(id_to_sharded_param_map[name], value) for key, value in template.items()}
        for name in names
    }
    # The tree is built with examples and emptied afterwards: targets then have the structure of a save, whatever rules
    # do.
    full = {**optim_state_dict, "state": states}
    tree = optim_state_to_sharding_state(full, id_to_sharded_param_map, rules=rules)
    return {**tree, "state": map_shards(_without_data, tree["state"])}


def abstract_optim_state_from_metadata(
    optim_state_dict: StateDict,
    id_to_sharded_param_map: Mapping[Any, ShardedParam],
    metadata: Metadata,
    exclude_keys: Sequence[str] = (),
    *,
    rules: OptimizerRules | None = None,
    missing: Literal["refuse", "leave_out"] = "refuse",
) -> ShardedStateDict:
    """Return the target with which an optimizer without states loads a checkpoint, made from the checkpoint's metadata.

    Args:
        optim_state_dict: State dict of the fresh optimizer, for its groups; its states are ignored.
        id_to_sharded_param_map: Sharded parameters by id or name, as for `optim_state_to_sharding_state`.
        metadata: Metadata of the stored states: ``load_sharded_metadata(dir)``; or ``load_tensors_metadata(dir)`` if no
            state is a Python value. Moments of a scalar parameter are stored in the same shape as its step count. If
            this rank holds the parameter as a flat range, or stacked along a prepended axis, the two can't be told
            apart: use `abstract_optim_state`.
        exclude_keys: State keys that aren't loaded; a single text is one key.
        rules: Rules for states of other shapes, as for `optim_state_to_sharding_state`. The rules get states without
            data.
        missing: Treatment of a parameter without a stored state, because it had no gradient yet, is new or was renamed:
            "refuse" raises an error, "leave_out" makes no target for its states.

    Raises:
        TreeError: A stored state of another shape has no rule, a parameter has no stored state, or a state may be
            either a moment or a number; the error names each.

    Examples:
        >>> weight = ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 1, 4))
        >>> stored = ShardedTensor.from_rank_offsets("optimizer.state.exp_avg.w", torch.zeros(8).half())
        >>> fresh = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        >>> tree = abstract_optim_state_from_metadata(fresh, {0: weight}, {stored.key: stored})
        >>> tree["state"][0]["exp_avg"].dtype, tree["state"][0]["exp_avg"].global_offset
        (torch.float16, (2,))
    """
    doing = "abstract_optim_state_from_metadata"
    states_of(doing, optim_state_dict)
    groups = groups_of(doing, optim_state_dict["param_groups"])
    check_rules(doing, rules)
    if missing not in ("refuse", "leave_out"):
        raise TreeError(
            error_text(f"{doing}: unknown value of missing=", found=repr(missing), expected="'refuse' or 'leave_out'")
        )
    check_dict(doing, "metadata", metadata, "the result of `load_sharded_metadata`", (ShardedTensor, ShardedObject))
    by_param = _by_param(metadata, excluded(doing, exclude_keys))
    check_known(doing, members(groups), id_to_sharded_param_map)
    params = {name: id_to_sharded_param_map[name] for name in members(groups)}
    kinds_of = {name: kinds for name, param in params.items() if (kinds := _stored_kinds(param, by_param))}
    absent = [repr(name) for name in dict.fromkeys(members(groups)) if name not in kinds_of]
    if absent and missing != "leave_out":
        fix = "Rename the stored states or the parameters; or pass missing='leave_out' to load no states for these."
        raise TreeError(error_text(f"{doing}: parameters without a stored state", offenders=absent, fix=fix))
    # All offenders are collected before the first leaf is made, so that one error names them.
    _check_kinds(doing, params, kinds_of, rules)
    state = {
        name: _with_lists(
            doing, name, {key: _target_leaf(params[name], key, kinds, rules) for key, kinds in stored.items()}
        )
        for name, stored in kinds_of.items()
    }
    by_name = are_names(doing, groups, {})
    group_params = _with_stored_group(doing, params, kinds_of, metadata) if by_name else params
    tree = {**optim_state_dict, "state": map_shards(_without_data, state)}
    return {**tree, **stored_groups(groups, group_params, named=by_name)}


def _template_state(param: ShardedParam, value: Any) -> Any:
    """Return an example of a state from its template entry; for a dtype, a meta tensor of the parameter's shape."""
    if isinstance(value, torch.dtype):
        return torch.empty(moment_shape(param) or (), dtype=value, device="meta")
    return value(param) if callable(value) else value


def _by_param(metadata: Metadata, left_out: set[str]) -> _Stored:
    """Return the stored states by parameter key, then state key, without the state keys `left_out`.

    A stored key is ``optimizer.state.<state key>.<parameter key>``. The state key has no dots.
    """
    by_param: dict[str, dict[str, ShardedTensor | ShardedObject]] = {}
    for leaf in metadata.values():
        state_key, _, key = leaf.key.removeprefix(f"{PREFIX}.").partition(".")
        if leaf.key.startswith(f"{PREFIX}.") and list_item(state_key)[0] not in left_out:
            by_param.setdefault(key, {})[state_key] = leaf
    return by_param


def _with_lists(doing: str, name: Any, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's states by state key; list items, such as `Q[0]` and `Q[1]`, become one list, in order.

    Args:
        doing: Name of the operation in error messages.
        name: Name or id of the parameter, for error messages.
        leaves: Target leaves of the states, by state key or list item.
    """
    states: dict[str, Any] = {}
    for key, leaf in sorted(leaves.items(), key=lambda pair: list_item(pair[0])[1] or 0):
        state_key, number = list_item(key)
        items = [] if number is None else states.setdefault(state_key, [])
        if number is None:
            states[key] = leaf
        elif len(items) < number:
            path = render_path((name,), "state")
            wrong = [f"{state_key!r} of {path}: item {len(items)} is missing, but item {number} is there"]
            fix = (
                "Pass the result of `load_sharded_metadata` as metadata=: `load_tensors_metadata` leaves out items "
                "that are not tensors."
            )
            heading = f"{doing}: the metadata has only some items of a state that is a list"
            raise TreeError(error_text(heading, offenders=wrong, fix=fix))
        else:
            items.append(leaf)
    return states


_Kinds = list[tuple[ShardedTensor, ShardedTensor | ShardedObject]]  # a parameter's stored shard, and its state


def _stored_kinds(param: ShardedParam, by_param: _Stored) -> dict[str, _Kinds]:
    """Return a parameter's stored states by state key, as lists of pairs: a shard of the parameter, and its state.

    A list has one pair for a parameter that is a shard. For a factory, it has a pair for each shard that it builds.
    """
    kinds: dict[str, _Kinds] = {}
    shards = built_shards(param)
    for shard in shards:
        for state_key, leaf in by_param.get(shard.key, {}).items():
            kinds.setdefault(state_key, []).append((shard, leaf))
    if not shards:  # this rank stores nothing of the parameter, for example only the padding of a vocabulary
        kinds = {state_key: [(_shard_for(leaf), leaf)] for state_key, leaf in by_param.get(param.key, {}).items()}
    return kinds


def _with_stored_group(
    doing: str, params: Mapping[Any, ShardedParam], kinds_of: Mapping[Any, Any], metadata: Metadata
) -> dict[Any, ShardedParam]:
    """Return the parameters, by name, whose group number is stored: all except new ones.

    Raises:
        TreeError: A parameter has stored states, but no stored group number.
    """
    stored_keys = {leaf.key for leaf in metadata.values() if leaf.key.startswith(f"{GROUP_PREFIX}.")}
    keys = {name: {f"{GROUP_PREFIX}.{shard.key}" for shard in built_shards(param)} for name, param in params.items()}
    group_params = {name: param for name, param in params.items() if keys[name] <= stored_keys}
    wrong = [repr(name) for name in kinds_of if name not in group_params]
    if wrong:
        fix = (
            "If the optimizer was saved with integer ids instead of names, use ids in both optim_state_dict= and "
            "id_to_sharded_param_map=.\n  Otherwise, pass the result of `load_sharded_metadata` as metadata=."
        )
        heading = f"{doing}: the metadata does not tell the param group of these parameters"
        raise TreeError(error_text(heading, offenders=wrong, fix=fix))
    return group_params


def _shard_for(leaf: ShardedTensor | ShardedObject) -> ShardedTensor:
    """Return a substitute for a parameter's shard, which this rank lacks, to pair with the parameter's stored state.

    It is the stored state itself if that is a tensor with axes, else an empty shard.
    """
    if isinstance(leaf, ShardedTensor) and leaf.global_shape:
        return leaf
    return ShardedTensor(leaf.key, None, torch.uint8, (0,), (1,), (0,), None)


def _check_kinds(
    doing: str, params: Mapping[Any, ShardedParam], kinds_of: Mapping[Any, Mapping[str, _Kinds]], rules: Any
) -> None:
    problems = [
        f"{key!r} of {render_path((name,), 'state')}: {problem}"
        for name, kinds_by_key in kinds_of.items()
        for key, kinds in kinds_by_key.items()
        if rule_of(rules, params[name], key) is None
        for shard, leaf in kinds
        if (problem := _problem(params[name], shard, leaf))
    ]
    if problems:
        heading = f"{doing}: stored states that are not shaped like their parameters"
        raise TreeError(error_text(heading, offenders=problems, fix=RULES_FIX))


def _problem(param: ShardedParam, shard: ShardedTensor, leaf: ShardedTensor | ShardedObject) -> str | None:
    """Return the reason why a stored state's sharding can't be derived from its parameter's; None if it can."""
    if not isinstance(leaf, ShardedTensor):
        return None
    kinds = [_is_moment(shard, leaf), leaf.global_shape == shard.global_shape[: shard.prepend_axis_num]]
    if not any(kinds):
        return f"{leaf.global_shape} is stored, the parameter has {shard.global_shape}"
    if all(kinds) and moment_shape(param) != ():
        return f"{leaf.global_shape} is stored: it may be a moment or a number, so use `abstract_optim_state`"
    return None


def _is_moment(shard: ShardedTensor, leaf: ShardedTensor) -> bool:
    same_axes = len(leaf.global_shape) == len(shard.global_shape)
    return leaf.global_shape == shard.global_shape or (shard.allow_shape_mismatch and same_axes)


def _target_leaf(param: ShardedParam, state_key: str, kinds: _Kinds, rules: OptimizerRules | None) -> Any:
    """Return the target leaf of a stored state."""
    shard, leaf = kinds[0]
    if rule_of(rules, param, state_key) is not None:
        return state_leaf(param, state_key, leaf, rules)
    if isinstance(leaf, ShardedObject):
        return per_parameter(param, f"{PREFIX}.{state_key}", None)
    if _is_moment(shard, leaf):
        shape = moment_shape(param)
        data = None if shape is None else torch.empty(shape, dtype=leaf.dtype, device="meta")
        if data is None:
            return replace(param, key=f"{PREFIX}.{state_key}.{param.key}", data=None)
        return state_leaf(param, state_key, data, None)
    return per_parameter(param, f"{PREFIX}.{state_key}", torch.empty((), dtype=leaf.dtype, device="meta"))


def _without_data(leaf: Any) -> Any:
    """Return a leaf without data; a factory gets a meta tensor as data, whose shape it needs to build."""
    if isinstance(leaf, (ShardedTensor, ShardedObject)):
        return leaf.without_data()
    if isinstance(leaf, ShardedTensorFactory) and isinstance(leaf.data, torch.Tensor) and not leaf.data.is_meta:
        return leaf.without_data()
    return leaf

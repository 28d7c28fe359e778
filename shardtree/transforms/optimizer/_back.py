"""The way back: a loaded tree as what an optimizer's `load_state_dict` takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...errors import TreeError, error_text
from ...mapping import StateDict
from ._groups import MEMBERS, Hyperparameters, arranged_groups, check_which
from ._state_dict import Group, States, groups_of, members, states_of


def sharding_state_to_optim_state(loaded: StateDict, *, hyperparameters: Hyperparameters = "stored") -> StateDict:
    """Return what was loaded for a sharded optimizer state, as what `load_state_dict` takes. Nothing is changed.

    By ids this only checks: group i has the hyperparameters of the stored group i, whoever is in it. By names, groups
    are the optimizer's own, in its order, each with the hyperparameters that its parameters had, wherever they were.

    Args:
        loaded: what `load` gave for a tree of `optim_state_to_sharding_state` or `abstract_optim_state`.
        hyperparameters: for names, whether those are the stored ones or the optimizer's own, as its state dict had
            them when the target was made.

    Returns:
        A state dict by ids or by names, as the target was; `optim_state_by_id` turns names into ids.

    Raises:
        TreeError: parameters that are one group now had different hyperparameters; a state is of no group's
            parameter; parts are missing; the optimizer's own are asked for by ids. Names each.

    Examples:
        >>> import torch, shardtree as st
        >>> params = {name: st.ShardedTensor.from_rank_offsets(name, torch.zeros(2)) for name in ("b", "w")}
        >>> groups = [{"lr": 0.1, "params": ["w"]}, {"lr": 0.2, "params": ["b"]}]
        >>> saved = st.optim_state_to_sharding_state({"state": {}, "param_groups": groups}, params)
        >>> storage = st.MemoryStorage()
        >>> st.save({"o": saved}, storage)
        >>> fresh = {"state": {}, "param_groups": [{"lr": 0.0, "params": ["b"]}, {"lr": 0.0, "params": ["w"]}]}
        >>> loaded = st.load({"o": st.optim_state_to_sharding_state(fresh, params)}, storage)
        >>> sharding_state_to_optim_state(loaded["o"])["param_groups"]
        [{'lr': 0.2, 'params': ['b']}, {'lr': 0.1, 'params': ['w']}]
    """
    doing = "sharding_state_to_optim_state"
    states = states_of(doing, {"state": {}, **loaded} if isinstance(loaded, Mapping) else loaded)
    if "own_param_groups" in loaded:
        own = groups_of(doing, loaded["own_param_groups"])
        groups = arranged_groups(doing, loaded["param_groups"], loaded.get("param_group_of", {}), own, hyperparameters)
    else:
        check_which(doing, hyperparameters)
        if hyperparameters == "own":
            fix = "Save and load by names, or put those of `optimizer.state_dict()` into the groups that you get."
            raise TreeError(error_text(f"{doing}: by ids nothing tells the optimizer's own hyperparameters", fix=fix))
        groups = [dict(group) for group in groups_of(doing, loaded["param_groups"])]
    _check_members(doing, states, groups)
    rest = {key: value for key, value in loaded.items() if key not in {"param_group_of", "own_param_groups"}}
    return {**rest, "state": {name: dict(state) for name, state in states.items()}, "param_groups": groups}


def regroup_optim_state(
    optim_state_dict: StateDict, param_groups: Sequence[Group], *, hyperparameters: Hyperparameters = "stored"
) -> StateDict:
    """Return a state dict by names with the groups of another one, as that one has them and in its order.

    torch binds states to parameters by their positions in groups, so an optimizer with other groups, or with other
    places in them, needs this first.

    Args:
        optim_state_dict: by names.
        param_groups: groups of names, such as those of ``optim_state_by_name(optimizer.state_dict(), names)``.
        hyperparameters: "stored" takes those that the parameters had, "own" those of `param_groups`.

    Raises:
        TreeError: parameters of one new group had different hyperparameters, or a parameter is in only one of the two.

    Examples:
        >>> groups = [{"lr": 1, "params": ["w"]}, {"lr": 2, "params": ["b"]}]
        >>> state = {"state": {"w": {"step": 1}}, "param_groups": groups}
        >>> regroup_optim_state(state, [{"params": ["b"]}, {"params": ["w"]}])["param_groups"]
        [{'lr': 2, 'params': ['b']}, {'lr': 1, 'params': ['w']}]
    """
    doing = "regroup_optim_state"
    states, stored = states_of(doing, optim_state_dict), groups_of(doing, optim_state_dict["param_groups"])
    own = groups_of(doing, param_groups)
    group_of = {name: number for number, group in enumerate(stored) for name in group["params"]}
    groups = arranged_groups(doing, stored, group_of, own, hyperparameters)
    _check_members(doing, states, groups)
    return {**optim_state_dict, "param_groups": groups}


def _check_members(doing: str, states: States, groups: Sequence[Group]) -> None:
    strangers = [repr(name) for name in states if name not in set(members(groups))]
    if strangers:
        fix = f"Leave these states out, or give the groups that have these parameters in {MEMBERS[0]!r}."
        raise TreeError(error_text(f"{doing}: states of parameters that no group has", offenders=strangers, fix=fix))

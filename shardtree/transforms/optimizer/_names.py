"""A state dict by ids as one by names, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import TreeError, error_text
from ...mapping import StateDict
from ._arguments import check_dict
from ._state_dict import are_names, groups_of, members, states_of

_MAP = "{id: name}"


def optim_state_by_name(optim_state_dict: StateDict, id_to_name: Mapping[int, str]) -> StateDict:
    """Return a state dict whose parameters are named, from one whose parameters are numbered; values are shared.

    Args:
        optim_state_dict: what ``optimizer.state_dict()`` gives.
        id_to_name: what `get_param_id_to_name_map` gives.

    Raises:
        TreeError: an id has no name, two have one, or parameters are named already; names each.

    Examples:
        >>> state = {"state": {0: {"step": 3}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
        >>> optim_state_by_name(state, {0: "w", 1: "b"})
        {'state': {'w': {'step': 3}}, 'param_groups': [{'lr': 0.1, 'params': ['w', 'b']}]}
    """
    doing = "optim_state_by_name"
    check_dict(doing, "id_to_name", id_to_name, _MAP, str)
    return _relabelled(doing, optim_state_dict, id_to_name, named=False)


def optim_state_by_id(optim_state_dict: StateDict, id_to_name: Mapping[int, str]) -> StateDict:
    """Return a state dict whose parameters are numbered, from one whose parameters are named; values are shared.

    torch binds states to parameters by positions, so groups must have them in the order of their ids; else
    `regroup_optim_state` comes first.

    Args:
        optim_state_dict: by names.
        id_to_name: the optimizer's, as `get_param_id_to_name_map` gives it.

    Raises:
        TreeError: a name has no id, groups are in another order or lack a parameter, or parameters are numbered
            already; names each.

    Examples:
        >>> state = {"state": {"w": {"step": 3}}, "param_groups": [{"lr": 0.1, "params": ["w", "b"]}]}
        >>> optim_state_by_id(state, {0: "w", 1: "b"})
        {'state': {0: {'step': 3}}, 'param_groups': [{'lr': 0.1, 'params': [0, 1]}]}
    """
    doing = "optim_state_by_id"
    check_dict(doing, "id_to_name", id_to_name, _MAP, str)
    ids = {name: number for number, name in id_to_name.items()}
    numbered = _relabelled(doing, optim_state_dict, ids, named=True)
    found = members(numbered["param_groups"])
    if found != sorted(id_to_name):
        wrong = [
            f"place {place}: {_told(id_to_name, here)}, expected {_told(id_to_name, should)}"
            for place, (here, should) in enumerate(_beside(found, sorted(id_to_name)))
            if here != should
        ]
        what = f"{doing}: the optimizer has its parameters in another order, and torch goes by order"
        raise TreeError(error_text(what, offenders=wrong, fix="Arrange them with `regroup_optim_state` first."))
    return numbered


def _beside(left: list[Any], right: list[Any]) -> list[tuple[Any, Any]]:
    most = max(len(left), len(right))
    return list(zip(*(side + [None] * (most - len(side)) for side in (left, right)), strict=True))


def _told(id_to_name: Mapping[int, str], number: int | None) -> str:
    return "nothing" if number is None else repr(id_to_name[number])


def _relabelled(doing: str, optim_state_dict: StateDict, labels: Mapping[Any, Any], *, named: bool) -> StateDict:
    """Return a state dict with other labels for its parameters."""
    states = states_of(doing, optim_state_dict)
    groups = groups_of(doing, optim_state_dict["param_groups"])
    if members(groups) and are_names(doing, groups, states) is not named:
        found, expected = ("ids", "names") if named else ("names", "ids")
        raise TreeError(error_text(f"{doing}: parameters", found=found, expected=expected))
    used = dict.fromkeys([*members(groups), *states])
    wrong = [f"{label!r} isn't known" for label in used if label not in labels]
    new = [labels[label] for label in used if label in labels]
    wrong += [f"{one!r} would be several" for one in dict.fromkeys(new) if new.count(one) > 1]
    if wrong:
        fix = "Make the map with `get_param_id_to_name_map` from this optimizer and its model."
        raise TreeError(error_text(f"{doing}: parameters that can't be told apart", offenders=wrong, fix=fix))
    relabelled = [{**group, "params": [labels[label] for label in group["params"]]} for group in groups]
    state = {labels[label]: own for label, own in states.items()}
    return {**optim_state_dict, "state": state, "param_groups": relabelled}

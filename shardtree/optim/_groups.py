"""Parameter groups: their stored form, and the assignment of stored hyperparameters to an optimizer's own groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from ..core.mapping import LocalNonpersistentObject
from ..core.trees import diff
from ..errors import TreeError, error_text
from ._per_parameter import per_parameter
from ._state_dict import Group, ShardedParam, members

Hyperparameters: TypeAlias = Literal["stored", "own"]

MEMBERS = ("params", "param_names")  # members aren't stored: with pipelines or ZeRO they differ between ranks
GROUP_PREFIX = "optimizer.param_group"


def stored_groups(groups: Sequence[Group], params: Mapping[Any, ShardedParam], *, named: bool) -> dict[str, Any]:
    """Return the entries of a sharded tree that store the hyperparameters of parameter groups.

    If parameters are named, the entries also store the index of each parameter's group, by the parameter's name.

    Args:
        groups: Parameter groups of a state dict.
        params: Sharded parameters by id or name.
        named: Whether parameters are named; otherwise, they are numbered.
    """
    # A rank without parameters can't know whether those of other ranks are named, so its form fits both.
    if not members(groups):
        return _without_members(groups)
    if not named:  # hyperparameters by the group's position; members stay on the rank
        local = [
            {key: LocalNonpersistentObject(value) if key in MEMBERS else value for key, value in group.items()}
            for group in groups
        ]
        return {"param_groups": local}
    # Parameters that aren't among `params` have no group number to store or request.
    of = {
        name: per_parameter(params[name], GROUP_PREFIX, number)
        for number, group in enumerate(groups)
        for name in group["params"]
        if name in params
    }
    return {**_without_members(groups), "param_group_of": of}


def _without_members(groups: Sequence[Group]) -> dict[str, Any]:
    return {
        "param_groups": [hyperparameters(group) for group in groups],
        "own_param_groups": LocalNonpersistentObject(groups),
    }


def hyperparameters(group: Group) -> dict[str, Any]:
    """Return a group's hyperparameters: its entries except the lists of parameters."""
    return {key: value for key, value in group.items() if key not in MEMBERS}


def arranged_groups(
    doing: str,
    stored: Sequence[Group],
    group_of: Mapping[Any, int],
    own: Sequence[Group],
    which: Hyperparameters,
) -> list[dict[str, Any]]:
    """Return an optimizer's groups, in its order, with its own hyperparameters or the stored ones.

    Args:
        doing: Name of the operation in error messages.
        stored: Stored groups; their lists of parameters are ignored.
        group_of: Index of each parameter's stored group, by the parameter's name.
        own: The optimizer's groups, with names of parameters.
        which: "own" keeps the optimizer's hyperparameters. "stored" replaces those of each group by the hyperparameters
            that its parameters had when they were stored. A group without parameters on this rank, as under ZeRO, then
            gets those of the stored group at its index. It keeps its own if the number of groups has changed, or if
            some parameter on this rank was stored in a group at another index.

    Raises:
        TreeError: Parameters of one group had different hyperparameters, or parameters aren't stored; the error names
            each.
    """
    check_which(doing, which)
    if which == "own":
        return [dict(group) for group in own]
    lost = [repr(name) for group in own for name in group["params"] if name not in group_of]
    if lost:
        fix = "Pass hyperparameters='own' to keep the optimizer's own hyperparameters."
        raise TreeError(error_text(f"{doing}: parameters without a stored group", offenders=lost, fix=fix))
    conflicts = [line for number, group in enumerate(own) for line in _conflicts(number, group, stored, group_of)]
    if conflicts:
        heading = f"{doing}: parameters of one group had different hyperparameters when they were stored"
        fix = "Pass hyperparameters='own' to keep the optimizer's own values, or group the parameters as they were."
        raise TreeError(error_text(heading, offenders=conflicts, fix=fix))
    # A group without members on this rank can be matched only by position, if all others are in place.
    same_groups = len(own) == len(stored) and all(
        group_of[name] == number for number, group in enumerate(own) for name in group["params"]
    )
    return [
        _with_hyperparameters(group, stored, group_of, number if same_groups else None)
        for number, group in enumerate(own)
    ]


def check_which(doing: str, which: object) -> None:
    """Raise an error unless a `hyperparameters` argument is "stored" or "own".

    Raises:
        TreeError: The argument isn't "stored" or "own".

    Examples:
        >>> check_which("load", "own")
    """
    if which not in ("stored", "own"):
        raise TreeError(
            error_text(f"{doing}: unknown value of hyperparameters", found=repr(which), expected="'stored' or 'own'")
        )


def _with_hyperparameters(
    group: Group, stored: Sequence[Group], group_of: Mapping[Any, int], place: int | None
) -> dict[str, Any]:
    number = group_of[group["params"][0]] if group["params"] else place
    if number is None:
        return dict(group)
    kept = {key: group[key] for key in MEMBERS if key in group}
    return hyperparameters(stored[number]) | kept


def _conflicts(number: int, group: Group, stored: Sequence[Group], group_of: Mapping[Any, int]) -> list[str]:
    """Return a line for each hyperparameter whose stored values differ between the parameters of one group.

    A line names two parameters and their stored values.

    Args:
        number: Index of the group, for the lines.
        group: Group of the optimizer, whose parameters may come from several stored groups.
        stored: Stored groups.
        group_of: Index of each parameter's stored group, by the parameter's name.
    """
    names = {group_of[name]: name for name in reversed(group["params"])}
    lines: list[str] = []
    first: int | None = None
    for number_of_group, name in sorted(names.items(), key=lambda pair: group["params"].index(pair[1])):
        first = number_of_group if first is None else first
        left, right = hyperparameters(stored[first]), hyperparameters(stored[number_of_group])
        differ = sorted(key for key in left.keys() | right.keys() if diff([left.get(key)], [right.get(key)]))
        pair = f"{names[first]!r} had {{}}, {name!r} had {{}}"
        lines += [f"group {number}: {key!r}: {pair.format(left.get(key), right.get(key))}" for key in differ]
    return lines

"""Parameter groups: hyperparameters as they are stored, and put together again for an optimizer's own groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from ..errors import TreeError, error_text
from ..mapping import LocalNonpersistentObject
from ..trees import diff
from ._per_parameter import per_parameter
from ._state_dict import Group, ShardedParam, members

Hyperparameters: TypeAlias = Literal["stored", "own"]

MEMBERS = ("params", "param_names")  # which parameters a group has on this rank: others may have others
GROUP_PREFIX = "optimizer.param_group"


def numbered_groups(groups: Sequence[Group]) -> dict[str, Any]:
    """Return groups of ids as they are stored: hyperparameters by the group's position, members on this rank alone."""
    local = [
        {key: LocalNonpersistentObject(value) if key in MEMBERS else value for key, value in group.items()}
        for group in groups
    ]
    return {"param_groups": local}


def stored_groups(groups: Sequence[Group], params: Mapping[Any, ShardedParam], *, named: bool) -> dict[str, Any]:
    """Return groups as they are stored; where a rank has no parameters, nothing tells whether others' are named."""
    if not members(groups):
        return _hyperparameters_alone(groups)
    return named_groups(groups, params) if named else numbered_groups(groups)


def _hyperparameters_alone(groups: Sequence[Group]) -> dict[str, Any]:
    return {
        "param_groups": [hyperparameters(group) for group in groups],
        "own_param_groups": LocalNonpersistentObject(groups),
    }


def named_groups(groups: Sequence[Group], params: Mapping[Any, ShardedParam]) -> dict[str, Any]:
    """Return groups of names as they are stored: hyperparameters, and for each parameter which of them are its own.

    Of parameters that aren't among `params` nothing is stored, so that nothing is asked for.
    """
    of = {
        name: per_parameter(params[name], GROUP_PREFIX, number)
        for number, group in enumerate(groups)
        for name in group["params"]
        if name in params
    }
    return {**_hyperparameters_alone(groups), "param_group_of": of}


def hyperparameters(group: Group) -> dict[str, Any]:
    """Return what a group has beside its members."""
    return {key: value for key, value in group.items() if key not in MEMBERS}


def arranged_groups(
    doing: str,
    stored: Sequence[Group],
    group_of: Mapping[Any, int],
    own: Sequence[Group],
    which: Hyperparameters,
) -> list[dict[str, Any]]:
    """Return an optimizer's own groups, in its order, with the hyperparameters that their parameters had when stored.

    Args:
        doing: for the error.
        stored: groups; their members don't count.
        group_of: the number of each parameter's stored group.
        own: the optimizer's groups, of names.
        which: "own" keeps the optimizer's hyperparameters. A group without members keeps them too, unless the groups
            are those that were stored, in their order: under ZeRO a rank may have nothing of a group that others have.

    Raises:
        TreeError: parameters of one group had different hyperparameters, or aren't stored; names each.
    """
    check_which(doing, which)
    if which == "own":
        return [dict(group) for group in own]
    lost = [repr(name) for group in own for name in group["params"] if name not in group_of]
    if lost:
        fix = "Pass hyperparameters='own' to keep the optimizer's, or take these parameters out of it."
        raise TreeError(error_text(f"{doing}: parameters that no stored group has", offenders=lost, fix=fix))
    conflicts = [line for number, group in enumerate(own) for line in _conflicts(number, group, stored, group_of)]
    if conflicts:
        what = f"{doing}: parameters of one group had different hyperparameters when they were stored"
        fix = "Pass hyperparameters='own' to keep the optimizer's, or group the parameters as they were."
        raise TreeError(error_text(what, offenders=conflicts, fix=fix))
    alike = len(own) == len(stored) and all(_is_from(number, group, group_of) for number, group in enumerate(own))
    return [_filled(group, stored, group_of, number if alike else None) for number, group in enumerate(own)]


def check_which(doing: str, which: object) -> None:
    """Raise unless this says whose hyperparameters count.

    Raises:
        TreeError: it doesn't.

    Examples:
        >>> check_which("load", "own")
    """
    if which not in ("stored", "own"):
        raise TreeError(error_text(f"{doing}: hyperparameters", found=repr(which), expected="'stored' or 'own'"))


def _is_from(number: int, group: Group, group_of: Mapping[Any, int]) -> bool:
    return all(group_of[name] == number for name in group["params"])


def _filled(group: Group, stored: Sequence[Group], group_of: Mapping[Any, int], place: int | None) -> dict[str, Any]:
    number = group_of[group["params"][0]] if group["params"] else place
    if number is None:
        return dict(group)
    kept = {key: group[key] for key in MEMBERS if key in group}
    return hyperparameters(stored[number]) | kept


def _conflicts(number: int, group: Group, stored: Sequence[Group], group_of: Mapping[Any, int]) -> list[str]:
    """Return, for each hyperparameter of a group on which its parameters differ, two that do."""
    names = {group_of[name]: name for name in reversed(group["params"])}
    lines: list[str] = []
    first: int | None = None
    for one, name in sorted(names.items(), key=lambda pair: group["params"].index(pair[1])):
        first = one if first is None else first
        left, right = hyperparameters(stored[first]), hyperparameters(stored[one])
        differ = sorted(key for key in left.keys() | right.keys() if diff([left.get(key)], [right.get(key)]))
        pair = f"{names[first]!r} had {{}}, {name!r} had {{}}"
        lines += [f"group {number}: {key!r}: {pair.format(left.get(key), right.get(key))}" for key in differ]
    return lines

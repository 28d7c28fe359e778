"""The parts of an optimizer's state dict, by ids or by names, and checks that it is one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from ..errors import TreeError, error_text
from ..mapping import ShardedTensor, ShardedTensorFactory

ShardedParam: TypeAlias = ShardedTensor | ShardedTensorFactory
ParamId: TypeAlias = int | str
Group: TypeAlias = Mapping[str, Any]
States: TypeAlias = Mapping[ParamId, Mapping[str, Any]]

_FORM = "{'state': {id or name: {...}}, 'param_groups': [{'params': [...], ...}]}"


def states_of(doing: str, optim_state_dict: Any) -> States:
    """Return the states by parameter of a state dict.

    Raises:
        TreeError: it isn't one; names each parameter whose state isn't a dict.

    Examples:
        >>> states_of("save", {"state": {0: {"step": 1}}, "param_groups": []})
        {0: {'step': 1}}
    """
    if not isinstance(optim_state_dict, Mapping) or not {"state", "param_groups"} <= optim_state_dict.keys():
        keys = optim_state_dict.keys() if isinstance(optim_state_dict, Mapping) else ()
        # torch's `get_optimizer_state_dict` can return a flat dict, which its keys show.
        flat = any(isinstance(key, str) and key.startswith(("state.", "param_groups.")) for key in keys)
        fix = "Take it nested: flatten_optimizer_state_dict=False." if flat else "Pass `optimizer.state_dict()`."
        found = "a flat dict" if flat else type(optim_state_dict).__name__
        raise TreeError(error_text(f"{doing}: not an optimizer's state dict", found=found, expected=_FORM, fix=fix))
    states: Any = optim_state_dict["state"]
    if not isinstance(states, Mapping):
        raise _not_a("state", doing, type(states).__name__, "a dict by parameter")
    wrong = [f"{name!r}: {type(state).__name__}" for name, state in states.items() if not isinstance(state, Mapping)]
    if wrong:
        raise _not_a("state", doing, None, "a dict for each parameter", wrong)
    return states


def groups_of(doing: str, param_groups: Any) -> list[Group]:
    """Return the parameter groups of a state dict.

    Raises:
        TreeError: names each group without a list of parameters.

    Examples:
        >>> groups_of("save", [{"lr": 0.1, "params": [0, 1]}])
        [{'lr': 0.1, 'params': [0, 1]}]
    """
    if not isinstance(param_groups, Sequence) or isinstance(param_groups, str):
        raise _not_a("param_groups", doing, type(param_groups).__name__, "a list of dicts")
    wrong = [f"group {number}" for number, group in enumerate(param_groups) if not _is_group(group)]
    if wrong:
        raise _not_a("param_groups", doing, None, "{'params': [ids or names], ...} for each group", wrong)
    return list(param_groups)


def _is_group(group: Any) -> bool:
    if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
        return False
    return all(isinstance(name, (int, str)) for name in group["params"])


def members(groups: Sequence[Group]) -> list[ParamId]:
    """Return the ids or names of all groups' parameters, in order.

    Examples:
        >>> members([{"params": [0, 2]}, {"params": [1]}])
        [0, 2, 1]
    """
    return [name for group in groups for name in group["params"]]


def are_names(doing: str, groups: Sequence[Group], states: States) -> bool:
    """Return whether parameters are named rather than numbered.

    Raises:
        TreeError: some are named and some numbered; names them.

    Examples:
        >>> are_names("save", [{"params": ["w"]}], {"w": {}}), are_names("save", [{"params": [0]}], {})
        (True, False)
    """
    found = dict.fromkeys([*members(groups), *states])
    named = [name for name in found if isinstance(name, str)]
    if named and len(named) < len(found):
        fix = (
            "Turn all of it into names with `optim_state_by_name`, or into ids with `optim_state_by_id`; and take what "
            "isn't a parameter's out of 'state'."
        )
        what = f"{doing}: some parameters are named, others numbered"
        raise TreeError(error_text(what, offenders=map(repr, found), fix=fix))
    return bool(named)


def _not_a(part: str, doing: str, found: str | None, expected: str, wrong: Sequence[str] = ()) -> TreeError:
    what = f"{doing}: not the {part!r} of an optimizer's state dict"
    fix = "Pass what `optimizer.state_dict()` gives."
    return TreeError(error_text(what, found=found, expected=expected, offenders=wrong, fix=fix))


# Checks of arguments' types.


def check_dict(doing: str, name: str, value: object, expected: str, kinds: Any = object) -> None:
    """Raise unless an argument is a dict, with values of some kinds.

    Raises:
        TreeError: names each value that isn't.

    Examples:
        >>> check_dict("save", "id_to_name", {0: "w"}, "{id: name}", str)
    """
    if not isinstance(value, Mapping):
        raise TreeError(error_text(f"{doing}: {name} isn't a dict", found=type(value).__name__, expected=expected))
    wrong = [f"{key!r}: {type(one).__name__}" for key, one in value.items() if not isinstance(one, kinds)]
    if wrong:
        raise TreeError(error_text(f"{doing}: {name}", expected=expected, offenders=wrong))


def check_params(doing: str, params: object) -> None:
    """Raise unless these are sharded parameters by id or name.

    Raises:
        TreeError: names each that isn't.

    Examples:
        >>> check_params("save", {})
    """
    expected = "{id or name: ShardedTensor or ShardedTensorFactory}"
    check_dict(doing, "id_to_sharded_param_map", params, expected, (ShardedTensor, ShardedTensorFactory))


def check_param(doing: str, param: object) -> None:
    """Raise unless this is a parameter's shard or factory.

    Raises:
        TreeError: it isn't.

    Examples:
        >>> import torch
        >>> check_param("save", ShardedTensor.from_rank_offsets("w", torch.zeros(2)))
    """
    if not isinstance(param, (ShardedTensor, ShardedTensorFactory)):
        expected = "a ShardedTensor or a ShardedTensorFactory"
        raise TreeError(error_text(f"{doing}: a parameter", found=type(param).__name__, expected=expected))


def excluded(doing: str, exclude_keys: object) -> set[Any]:
    """Return the state keys that are left out; one text is one key.

    Raises:
        TreeError: it isn't iterable.

    Examples:
        >>> excluded("save", "step"), sorted(excluded("save", ("step", "m")))
        ({'step'}, ['m', 'step'])
    """
    keys = [exclude_keys] if isinstance(exclude_keys, str) else exclude_keys
    if not isinstance(keys, Iterable):
        raise TreeError(error_text(f"{doing}: exclude_keys", found=repr(exclude_keys), expected="state keys"))
    return set(keys)

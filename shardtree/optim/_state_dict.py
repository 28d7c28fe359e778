"""An optimizer's state dict: its states and groups, checks of its form, and the parameter that belongs to each id."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ..core.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory
from ..core.trees import leaves_with_paths, path_key
from ..errors import TreeError, error_text

ShardedParam: TypeAlias = ShardedTensor | ShardedTensorFactory
ParamId: TypeAlias = int | str
Group: TypeAlias = Mapping[str, Any]
States: TypeAlias = Mapping[ParamId, Mapping[str, Any]]


def states_of(doing: str, optim_state_dict: Any) -> States:
    """Return the states of a state dict, by parameter.

    Raises:
        TreeError: The argument isn't a state dict; the error names each parameter whose state isn't a dict.

    Examples:
        >>> states_of("save", {"state": {0: {"step": 1}}, "param_groups": []})
        {0: {'step': 1}}
    """
    if not isinstance(optim_state_dict, Mapping) or not {"state", "param_groups"} <= optim_state_dict.keys():
        keys = optim_state_dict.keys() if isinstance(optim_state_dict, Mapping) else ()
        # torch's `get_optimizer_state_dict` can return a flat dict, which is recognised by its keys.
        flat = any(isinstance(key, str) and key.startswith(("state.", "param_groups.")) for key in keys)
        fix = "Get it nested, with flatten_optimizer_state_dict=False." if flat else "Pass `optimizer.state_dict()`."
        found = "a flat dict" if flat else type(optim_state_dict).__name__
        expected = "{'state': {id or name: {...}}, 'param_groups': [{'params': [...], ...}]}"
        raise TreeError(
            error_text(
                f"{doing}: the argument is not an optimizer's state dict", found=found, expected=expected, fix=fix
            )
        )
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
        TreeError: A group has no list of parameters; the error names each such group.

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
        TreeError: Some are named and some numbered; the error names them.

    Examples:
        >>> are_names("save", [{"params": ["w"]}], {"w": {}}), are_names("save", [{"params": [0]}], {})
        (True, False)
    """
    names = dict.fromkeys([*members(groups), *states])
    texts = [name for name in names if isinstance(name, str)]
    if texts and len(texts) < len(names):
        fix = (
            "Use names for all parameters or ids for all, in 'state' and in 'param_groups'.\n"
            "  Save entries of 'state' that belong to no parameter apart from the optimizer's state."
        )
        heading = f"{doing}: some parameters are named, others numbered"
        raise TreeError(error_text(heading, offenders=map(repr, names), fix=fix))
    return bool(texts)


def _not_a(part: str, doing: str, found: str | None, expected: str, wrong: Sequence[str] = ()) -> TreeError:
    heading = f"{doing}: invalid {part!r} in the optimizer's state dict"
    fix = "Pass the result of `optimizer.state_dict()`."
    return TreeError(error_text(heading, found=found, expected=expected, offenders=wrong, fix=fix))


# Checks of arguments' types.


def check_dict(doing: str, name: str, value: object, expected: str, kinds: Any = object) -> None:
    """Raise an error unless an argument is a dict whose values have the right type.

    Args:
        doing: Name of the operation in error messages.
        name: Name of the argument in error messages.
        value: The argument.
        expected: Text that describes a valid argument.
        kinds: Type, or types, of valid values.

    Raises:
        TreeError: The argument isn't a dict, or has values of other types; the error names each of these.

    Examples:
        >>> check_dict("save", "id_to_name", {0: "w"}, "{id: name}", str)
    """
    if not isinstance(value, Mapping):
        raise TreeError(error_text(f"{doing}: {name} is not a dict", found=type(value).__name__, expected=expected))
    wrong = [f"{key!r}: {type(one).__name__}" for key, one in value.items() if not isinstance(one, kinds)]
    if wrong:
        raise TreeError(error_text(f"{doing}: wrong values of {name}", expected=expected, offenders=wrong))


def check_params(doing: str, params: object) -> None:
    """Raise an error unless the argument maps ids or names to sharded parameters.

    Raises:
        TreeError: The argument isn't such a dict; the error names each wrong value.

    Examples:
        >>> check_params("save", {})
    """
    expected = "{id or name: ShardedTensor or ShardedTensorFactory}"
    check_dict(doing, "id_to_sharded_param_map", params, expected, (ShardedTensor, ShardedTensorFactory))


def check_param(doing: str, param: object) -> None:
    """Raise an error unless the argument is a parameter's shard or factory.

    Raises:
        TreeError: The argument is something else.

    Examples:
        >>> import torch
        >>> check_param("save", ShardedTensor.from_rank_offsets("w", torch.zeros(2)))
    """
    if not isinstance(param, (ShardedTensor, ShardedTensorFactory)):
        expected = "a ShardedTensor or a ShardedTensorFactory"
        raise TreeError(
            error_text(
                f"{doing}: the parameter is not a shard or factory", found=type(param).__name__, expected=expected
            )
        )


def excluded(doing: str, exclude_keys: object) -> set[Any]:
    """Return the state keys to leave out as a set; a single string is one key.

    Raises:
        TreeError: The argument isn't iterable.

    Examples:
        >>> excluded("save", "step"), sorted(excluded("save", ("step", "m")))
        ({'step'}, ['m', 'step'])
    """
    keys = [exclude_keys] if isinstance(exclude_keys, str) else exclude_keys
    if not isinstance(keys, Iterable):
        raise TreeError(
            error_text(
                f"{doing}: exclude_keys is not a list of state keys", found=repr(exclude_keys), expected="state keys"
            )
        )
    return set(keys)


# Parameters by id, found by identity, never by order or shape.


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: ShardedStateDict, optim_params_iter: Iterable[torch.Tensor] | torch.optim.Optimizer
) -> dict[int, ShardedParam]:
    """Return the sharded parameters of a model by the optimizer's ids.

    A shard belongs to a parameter if its data is the very same Python object; shapes, names and memory don't count. If
    a parameter is tied, so that one tensor has several keys, the alphabetically first key is used, on every rank.

    Args:
        model_sharded_state_dict: Shards and factories of the model, in any structure.
        optim_params_iter: The optimizer, or its parameters in the order of its groups.

    Returns:
        Shards and factories by id. Parameters that aren't in the tree are left out.

    Raises:
        TreeError: None of the optimizer's parameters is in the tree, some aren't tensors, or some are DTensors.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> tree = {"w": ShardedTensor.from_rank_offsets("w", weight, (0, 1, 4))}
        >>> get_param_id_to_sharded_param_map(tree, [torch.nn.Parameter(torch.zeros(2)), weight])
        {1: ShardedTensor(key='w', data=<float32 (2,) cpu>, ...)}

    References:
        megatron.core.dist_checkpointing.optimizer, megatron-core 0.16.1.
    """
    doing = "get_param_id_to_sharded_param_map"
    params = _params_in_order(doing, optim_params_iter)
    numbers = _numbers(params)
    leaves = [leaf for _, leaf in leaves_with_paths(model_sharded_state_dict) if _is_param(leaf)]
    by_id: dict[int, ShardedParam] = {}
    # Shards are sorted by key: ranks' dicts may have other orders, and all must choose the same of tied parameters.
    for leaf in sorted(leaves, key=lambda leaf: leaf.key):
        if id(leaf.data) in numbers:
            by_id.setdefault(numbers[id(leaf.data)], leaf)
    # Megatron-Core only warns here, and then fails on the first state, far from the cause: detached data.
    if params and not by_id:
        heading = f"{doing}: no shard's data is a parameter of the optimizer"
        counts = f"{len(leaves)} shards of other data", f"shards with the optimizer's {len(params)} parameters as data"
        fix = (
            "Set the model's own parameters as the shards' data, as in `model.state_dict(keep_vars=True)`: a detached "
            "parameter is a different tensor.\n  A factory's data must be the model's own parameter, too."
        )
        raise TreeError(error_text(heading, found=counts[0], expected=counts[1], fix=fix))
    return dict(sorted(by_id.items()))


def get_param_id_to_name_map(
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    optim_params_iter: Iterable[torch.Tensor] | torch.optim.Optimizer,
) -> dict[int, str]:
    """Return the names of a model's parameters by the optimizer's ids.

    Args:
        named_parameters: Result of `model.named_parameters()`. If one tensor has several names, the first is used.
        optim_params_iter: The optimizer, or its parameters in the order of its groups.

    Raises:
        TreeError: Some of the optimizer's parameters have no name, some items of `named_parameters` aren't pairs of a
            name and a parameter, or some parameters aren't tensors or are DTensors; the error lists them.

    Examples:
        >>> model = torch.nn.Linear(2, 3)
        >>> groups = [{"params": [model.bias]}, {"params": [model.weight]}]
        >>> get_param_id_to_name_map(model.named_parameters(), torch.optim.SGD(groups))
        {0: 'bias', 1: 'weight'}
    """
    doing = "get_param_id_to_name_map"
    params = _params_in_order(doing, optim_params_iter)
    names: dict[int, str] = {}
    for name, param in _pairs(doing, named_parameters):
        names.setdefault(id(param), name)
    numbers = {number: params[number] for number in _numbers(params).values()}
    wrong = [f"id {number}: {tuple(param.shape)}" for number, param in numbers.items() if id(param) not in names]
    if wrong:
        fix = "Pass as named_parameters= the (name, parameter) pairs of all modules that the optimizer updates."
        raise TreeError(error_text(f"{doing}: parameters without a name", offenders=wrong, fix=fix))
    return {number: names[id(param)] for number, param in numbers.items()}


def sharded_params_by_name(model_sharded_state_dict: ShardedStateDict) -> dict[str, ShardedParam]:
    """Return a model's shards and factories by their paths, joined by dots.

    Args:
        model_sharded_state_dict: Sharded tree of the model, flat as in ``{"decoder.weight": shard}`` or nested.

    Raises:
        TreeError: Two paths give the same name.

    Examples:
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
        >>> list(sharded_params_by_name({"decoder": {"weight": shard}, "step": 3}))
        ['decoder.weight']
    """
    pairs = [(path_key(path), leaf) for path, leaf in leaves_with_paths(model_sharded_state_dict) if _is_param(leaf)]
    by_name = dict(pairs)
    if len(by_name) < len(pairs):
        names = [name for name, _ in pairs]
        twice = [repr(name) for name in by_name if names.count(name) > 1]
        fix = "Rename keys: a name is the keys of the path, joined by dots."
        raise TreeError(error_text("sharded_params_by_name: two paths give the same name", offenders=twice, fix=fix))
    return by_name


def _pairs(doing: str, named_parameters: Any) -> list[tuple[str, torch.Tensor]]:
    """Return (name, parameter) pairs as a list, after checking that all of them are such pairs."""
    items = named_parameters.items() if isinstance(named_parameters, Mapping) else named_parameters
    pairs = list(items) if isinstance(items, Iterable) and not isinstance(items, torch.Tensor) else [items]
    wrong = [f"item {place}: {type(pair).__name__}" for place, pair in enumerate(pairs) if not _is_pair(pair)]
    if wrong:
        fix = "Pass `model.named_parameters()`."
        raise TreeError(error_text(f"{doing}: items that are not (name, parameter) pairs", offenders=wrong, fix=fix))
    return pairs


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and _is_tensor(pair[1])


def _is_param(leaf: Any) -> bool:
    return isinstance(leaf, (ShardedTensor, ShardedTensorFactory))


def _numbers(params: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return each parameter's first position in the optimizer's order, by `id(parameter)`."""
    numbers: dict[int, int] = {}
    for number, param in enumerate(params):
        numbers.setdefault(id(param), number)
    return numbers


def _params_in_order(doing: str, optim_params_iter: Any) -> list[torch.Tensor]:
    """Return an optimizer's parameters in the order of its groups, after checking that they are local tensors."""
    groups = getattr(optim_params_iter, "param_groups", None)
    # Ids are positions in the optimizer's groups. `model.parameters()` has that order only with a single group.
    items = optim_params_iter if groups is None else [param for group in groups for param in group["params"]]
    many = isinstance(items, Iterable) and not isinstance(items, (torch.Tensor, str))
    params = list(items) if many else []
    wrong = [f"item {place}: {type(param).__name__}" for place, param in enumerate(params) if not _is_tensor(param)]
    wrong += [] if many else [f"a single {type(items).__name__}"]
    if wrong:
        fix = "Pass the optimizer, or the parameters in its order."
        raise TreeError(error_text(f"{doing}: items that are not parameters", offenders=wrong, fix=fix))
    # A DTensor is recognised by an attribute: importing the class would load torch.distributed.
    cut = [f"item {place}: {tuple(param.shape)}" for place, param in enumerate(params) if hasattr(param, "placements")]
    if cut:
        fix = "Use `from_dtensors` of shardtree.interop.dtensor on the optimizer's state instead."
        raise TreeError(error_text(f"{doing}: parameters that are DTensors", offenders=cut, fix=fix))
    return params


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)

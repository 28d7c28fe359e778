"""Leaves for optimizer states: a state of a parameter becomes a shard, an object, or the result of the caller's rule.

If a state can't become a leaf, `problem_of` returns the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from ..core.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    check_has_shape,
    without_shape,
)
from ..core.trees import call_at, leaves_with_paths, match_key
from ..errors import ShapeError, TreeError, error_text, render_path
from ._per_parameter import per_parameter
from ._state_dict import ParamId, ShardedParam, check_param

# Moments: states of the parameter's shape, sharded as the parameter is.

PREFIX = "optimizer.state"


def make_sharded_optimizer_tensor(model_param: ShardedParam, optim_param: torch.Tensor, prefix: str) -> ShardedParam:
    """Return a parameter's shard or factory with a moment as data, under the parameter's key with a prefix.

    Args:
        model_param: Shard or factory of the parameter.
        optim_param: Moment of any dtype, with the shape of the parameter's data: flat for a flat range.
        prefix: Prefix of the key, joined by a dot.

    Raises:
        ShapeError: The tensor has another shape than the parameter.
        TreeError: `optim_param` is a DTensor or no tensor, or `model_param` is neither a shard nor a factory.

    Examples:
        >>> param = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 4))
        >>> moment = make_sharded_optimizer_tensor(param, torch.ones(2, 3).bfloat16(), "optimizer.state.exp_avg")
        >>> moment.key, moment.dtype, moment.global_offset
        ('optimizer.state.exp_avg.w', torch.bfloat16, (2, 0))

    References:
        megatron.core.dist_checkpointing.optimizer, megatron-core 0.16.1.
    """
    check_param("make_sharded_optimizer_tensor", model_param)
    heading = f"make_sharded_optimizer_tensor: {prefix!r} of {model_param.key!r}"
    if not isinstance(optim_param, torch.Tensor) or hasattr(optim_param, "placements"):
        found = "a DTensor" if isinstance(optim_param, torch.Tensor) else type(optim_param).__name__
        fix = "Pass a local tensor. For a DTensor, use `from_dtensors` of shardtree.interop.dtensor instead."
        raise TreeError(error_text(f"{heading} is not a local tensor", found=found, expected="a local tensor", fix=fix))
    check_has_shape(heading, optim_param)
    expected = moment_shape(model_param)
    if expected is not None and tuple(optim_param.shape) != expected:
        fix = "Pass this rank's part of the state. For states of other shapes, use `optim_state_to_sharding_state` "
        fix += "with its `rules`."
        wrong = f"{heading} has another shape than the parameter"
        raise ShapeError(error_text(wrong, found=tuple(optim_param.shape), expected=expected, fix=fix))
    return moment(model_param, optim_param, prefix)


def moment(param: ShardedParam, data: torch.Tensor, prefix: str) -> ShardedParam:
    """Return a copy of a parameter's shard or factory for a moment, with the moment's data and a prefixed key.

    The caller checks shapes.
    """
    if isinstance(param, ShardedTensorFactory):
        return replace(param, key=f"{prefix}.{param.key}", data=data)
    return replace(param, key=f"{prefix}.{param.key}", data=data, dtype=data.dtype)


def moment_shape(param: ShardedParam) -> tuple[int, ...] | None:
    """Return the shape of a parameter's moments on this rank; None for a factory without a tensor."""
    if isinstance(param, ShardedTensor):
        return param.data_shape
    shape: Any = getattr(param.data, "shape", None)
    return None if shape is None else tuple(shape)


# States of other shapes, laid out by rules.


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerState:
    """Argument of a rule: one state of one parameter, for a save or for the target of a load.

    A rule can't rely on a shape: a save knows only the shape on this rank, a load only the whole shape. Lengths of axes
    that are cut like the parameter follow from the parameter; lengths of other axes are in `sizes`.

    Attributes:
        data: The tensor or value; None if only stored metadata is known.
        dtype: Dtype of a tensor; None for any other value.
        sizes: Known lengths of a tensor's axes: those of this rank's tensor, or those of the stored tensor, which
            begin with the parameter's prepended axes.
        is_stored: Whether only stored metadata is known; then `sizes` is the stored tensor's shape.

    Examples:
        >>> state = OptimizerState.of(torch.zeros(2, 3))
        >>> state.dtype, state.axes(0)
        (torch.float32, 2)
    """

    data: Any
    dtype: torch.dtype | None = None
    sizes: tuple[int, ...] = ()
    is_stored: bool = False

    @staticmethod
    def of(value: Any) -> OptimizerState:
        """Return the `OptimizerState` of a value to save, or of a stored tensor's or object's metadata.

        Args:
            value: A tensor or plain value to save; stored metadata, as a ShardedTensor or ShardedObject; or an
                `OptimizerState`, which is returned as it is.
        """
        if isinstance(value, OptimizerState):
            return value
        if isinstance(value, ShardedTensor):
            return OptimizerState(None, value.dtype, value.global_shape, is_stored=True)
        if isinstance(value, ShardedObject):
            return OptimizerState(None, is_stored=True)
        is_tensor = isinstance(value, torch.Tensor)
        return OptimizerState(value, value.dtype, tuple(value.shape)) if is_tensor else OptimizerState(value)

    def axes(self, front: int) -> int:
        """Return the number of the state's axes, without `front` prepended ones."""
        return len(self.own_sizes(front))

    def own_sizes(self, front: int) -> tuple[int, ...]:
        """Return the lengths of the state's axes, without prepended ones.

        They are lengths on this rank or, if only stored metadata is known, in the whole stored tensor.

        Args:
            front: Number of prepended axes, with which a stored tensor's shape begins. A rank's own tensor has none.
        """
        return self.sizes[front:] if self.is_stored else self.sizes


OptimizerRule: TypeAlias = Callable[[ShardedParam, str, OptimizerState], Any]
"""Function from (parameter, state key, state) to the leaf, or tree of leaves, that stores `state.data`."""

OptimizerRules: TypeAlias = Mapping[str, OptimizerRule]

RULES_FIX = (
    "Say how such a state is sharded: rules={'<state key>': rule}, with `along` (axes cut as the parameter's), "
    "`reduced_axis` (factored second moments: `adafactor_rules`, `came_rules`), `square_preconditioners`, "
    "`block_scales` (8-bit states), `on_mesh`, `one_per_parameter`, `one_per_shard` or a function of your own; or "
    "leave it out with exclude_keys. States that are not of one parameter, such as those of LBFGS, cannot be sharded "
    "by parameter."
)


def check_rules(doing: str, rules: OptimizerRules | None) -> None:
    """Raise an error unless the rules are a dict from patterns to functions.

    Raises:
        TreeError: The rules aren't a dict, or some aren't functions; the error names each.

    Examples:
        >>> check_rules("save", {"row_var": max})
    """
    if rules is not None and not isinstance(rules, Mapping):
        fix = "Pass a dict such as {'row_var': rule}."
        raise TreeError(error_text(f"{doing}: rules is not a dict", found=type(rules).__name__, fix=fix))
    wrong = [f"{pattern!r}: {type(rule).__name__}" for pattern, rule in (rules or {}).items() if not callable(rule)]
    if wrong:
        raise TreeError(error_text(f"{doing}: rules that are not functions", offenders=wrong, fix=RULES_FIX))


def rule_of(rules: OptimizerRules | None, param: ShardedParam, state_key: str) -> OptimizerRule | None:
    """Return the first rule whose pattern matches a state key or ``<state key>.<parameter's key>``, or None."""
    # The second form lets a rule apply to some parameters only.
    whole = list_item(state_key)[0]
    names = (state_key, whole, f"{state_key}.{param.key}", f"{whole}.{param.key}")
    for pattern, rule in (rules or {}).items():
        if any(match_key(pattern, name) is not None for name in names):
            return rule
    return None


def state_place(name: ParamId, param: ShardedParam, state_key: object) -> str:
    """Return a text that names an optimizer state and its parameter, for error messages.

    Examples:
        >>> from shardtree.mapping import ShardedTensor
        >>> state_place(0, ShardedTensor.from_rank_offsets("w", torch.zeros(2)), "step")
        "'step' of state[0] ('w')"
    """
    return f"{state_key!r} of {render_path((name,), 'state')} ({param.key!r})"


# A list of tensors, such as SOAP's `Q`, is stored as a state for each item.

_ITEM = re.compile(r"(.+)\[(0|[1-9][0-9]*)\]", re.DOTALL)


def list_item(state_key: str) -> tuple[str, int | None]:
    """Split a list item's state key into the list's key and the item's index; any other key is returned with None.

    Examples:
        >>> list_item("Q[1]"), list_item("step")
        (('Q', 1), ('step', None))
    """
    match = _ITEM.fullmatch(state_key)
    return (state_key, None) if match is None else (match[1], int(match[2]))


def items_of(state_key: str, value: Any) -> dict[str, Any]:
    """Return the states to store for a value, by state key: the items of a list with tensors, else the value alone.

    Examples:
        >>> list(items_of("Q", [torch.zeros(2, 2), None])), list(items_of("betas", [0.9, 0.99]))
        (['Q[0]', 'Q[1]'], ['betas'])
    """
    if type(value) is list and any(isinstance(item, torch.Tensor) for item in value):
        return {f"{state_key}[{number}]": item for number, item in enumerate(value)}
    return {state_key: value}


def problem_of(name: ParamId, param: ShardedParam, state_key: str, value: Any) -> str | None:
    """Return the reason why a state can't be sharded as its parameter is; None if it can."""
    at = state_place(name, param, state_key)
    if not isinstance(value, torch.Tensor):
        inside = [leaf for _, leaf in leaves_with_paths([value])]
        kinds = (torch.Tensor, ShardedBase, LocalNonpersistentObject)
        if isinstance(value, (list, tuple, dict)) and any(isinstance(leaf, kinds) for leaf in inside):
            return f"{at}: tensors in a {type(value).__name__}"
        return None
    # A DTensor is recognised by an attribute: importing the class would load torch.distributed.
    if hasattr(value, "placements"):
        return f"{at}: a DTensor; use `from_dtensors` of shardtree.interop.dtensor"
    if shapeless := without_shape(value):
        return f"{at}: {shapeless}"
    expected = moment_shape(param)
    shape = tuple(value.shape)
    return None if expected is None or shape in (expected, ()) else f"{at}: {shape}, the parameter has {expected}"


def state_leaf(param: ShardedParam, state_key: str, value: Any, rules: OptimizerRules | None) -> Any:
    """Return the leaf that stores a state; if a rule matches the state, the rule makes the leaf.

    Without a rule, a tensor of the parameter's shape is sharded as the parameter is, and any other value is stored once
    for the whole parameter. A state without a rule must have passed `problem_of`.
    """
    rule, prefix = rule_of(rules, param, state_key), f"{PREFIX}.{state_key}"
    if rule is not None:
        return call_at(("state", param.key, state_key), rule, param, state_key, OptimizerState.of(value))
    if isinstance(value, torch.Tensor) and (value.ndim or moment_shape(param) == ()):
        return moment(param, value, prefix)
    return per_parameter(param, prefix, value)

"""An optimizer's state dict as a sharded tree, and back: states are sharded as their parameters are.

No function here changes its arguments. States belong to parameters by identity or name, and are stored under the
parameters' keys, so that the order of parameters doesn't matter.
"""

from ._abstract import abstract_optim_state, abstract_optim_state_from_metadata
from ._axes import adafactor_rules, along, came_rules, one_per_shard, reduced_axis
from ._convert import (
    optim_state_by_id,
    optim_state_by_name,
    optim_state_to_sharding_state,
    regroup_optim_state,
    sharding_state_to_optim_state,
)
from ._leaf import OptimizerRule, OptimizerState, make_sharded_optimizer_tensor
from ._per_parameter import per_parameter
from ._rules import block_scales, on_mesh, one_per_parameter, square_preconditioners
from ._state_dict import get_param_id_to_name_map, get_param_id_to_sharded_param_map, sharded_params_by_name

__all__ = [
    "OptimizerRule",
    "OptimizerState",
    "abstract_optim_state",
    "abstract_optim_state_from_metadata",
    "adafactor_rules",
    "along",
    "block_scales",
    "came_rules",
    "get_param_id_to_name_map",
    "get_param_id_to_sharded_param_map",
    "make_sharded_optimizer_tensor",
    "on_mesh",
    "one_per_parameter",
    "one_per_shard",
    "optim_state_by_id",
    "optim_state_by_name",
    "optim_state_to_sharding_state",
    "reduced_axis",
    "regroup_optim_state",
    "sharded_params_by_name",
    "sharding_state_to_optim_state",
    "square_preconditioners",
]

"""Arrays of objects in another shape: rules for state that isn't a tensor."""

from ._array import HeldArrays, ObjectArray, ObjectRule, held_arrays, own_copy
from ._reshard import (
    OBJECT_RULES,
    ShapeChange,
    check_ruled,
    objects_by_rule,
    reshaped_arrays,
    reshard_objects,
    rules_by_key,
)
from ._rules import (
    concatenate_objects,
    drop_objects,
    fold_objects,
    redistribute_objects,
    replicate_cell,
    replicate_objects,
    rules_by_field,
)

__all__ = [
    "ObjectArray",
    "ObjectRule",
    "ShapeChange",
    "concatenate_objects",
    "drop_objects",
    "fold_objects",
    "redistribute_objects",
    "replicate_cell",
    "replicate_objects",
    "reshard_objects",
    "rules_by_field",
]

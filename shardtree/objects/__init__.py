"""Arrays of objects in another shape: rules for state that isn't a tensor."""

from ._array import HeldArrays as HeldArrays
from ._array import ObjectArray as ObjectArray
from ._array import ObjectRule as ObjectRule
from ._array import held_arrays as held_arrays
from ._array import own_copy as own_copy
from ._reshard import OBJECT_RULES as OBJECT_RULES
from ._reshard import ShapeChange as ShapeChange
from ._reshard import check_ruled as check_ruled
from ._reshard import objects_by_rule as objects_by_rule
from ._reshard import reshaped_arrays as reshaped_arrays
from ._reshard import reshard_objects as reshard_objects
from ._reshard import rules_by_key as rules_by_key
from ._rules import concatenate_objects as concatenate_objects
from ._rules import drop_objects as drop_objects
from ._rules import fold_objects as fold_objects
from ._rules import redistribute_objects as redistribute_objects
from ._rules import replicate_cell as replicate_cell
from ._rules import replicate_objects as replicate_objects
from ._rules import rules_by_field as rules_by_field

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

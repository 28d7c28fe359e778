"""Pure functions on trees: stacking and keeping layers, splitting, merging and padding tensors, renaming keys.

Any tree will do: flat ones, such as an open checkpoint, nested dicts, lists, tuples and registered classes, of shards
or of plain tensors, whose keys are their paths. Beside shards, plain tensors are values that only go with their layer.
The result has new containers like the tree's. A removed leaf isn't in its dict; in a list, tuple or class a hole takes
its place, except at the end of a list or tuple, which gets shorter. New layers are in a dict with the keys "0", "1".
Lazy tensors aren't read: operations on them are recorded.

The package also changes single places, maps functions by key, and relates states to their parameters;
`shardtree.trees` exports these.
"""

from ._at import data_at, tree_at
from ._beyond import worst_element
from ._by_key import map_by_pattern, map_with_path
from ._elements import reduced_here, widened
from ._object_rules import drop_objects
from ._pad import pad_tensors, transpose_tensors, unpad_tensors
from ._params import map_params
from ._plain import flat, nested, rebox, unbox
from ._split import merge_tensors, split_tensor
from ._stack import keep_layers, partial_rename, stack_layers, unstack_layers

__all__ = [
    "keep_layers",
    "merge_tensors",
    "pad_tensors",
    "partial_rename",
    "split_tensor",
    "stack_layers",
    "transpose_tensors",
    "unpad_tensors",
    "unstack_layers",
]

"""Pure functions on trees: stacking and keeping layers, splitting, merging and padding tensors, renaming keys.

They take any tree: a flat one, such as an open checkpoint, or nested dicts, lists, tuples and registered classes.
Leaves are shards or plain tensors; a plain tensor's key is its path. In a tree with shards, plain tensors are values:
they are kept or removed with their layer, and their elements never change.

The result has new containers like the tree's. Removed leaves are left out of dicts. In a list, tuple or class a `HOLE`
takes their place, except at the end of a list or tuple, which gets shorter. New layers are in a dict with the keys "0",
"1". Lazy tensors aren't read: operations on them are recorded.

Other functions of this package replace single nodes, map functions by key, and relate optimizer states to their
parameters; `shardtree.trees` exports them.
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

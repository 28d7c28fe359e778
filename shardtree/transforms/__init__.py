"""Pure functions on flat trees: stacking layers, splitting, merging and padding tensors, renaming keys.

An open checkpoint is a flat tree. Lazy tensors aren't read: operations on them are recorded.
"""

from ._pad import pad_tensors as pad_tensors
from ._pad import transpose_tensors as transpose_tensors
from ._pad import unpad_tensors as unpad_tensors
from ._split import merge_tensors as merge_tensors
from ._split import split_tensor as split_tensor
from ._stack import partial_rename as partial_rename
from ._stack import stack_layers as stack_layers
from ._stack import unstack_layers as unstack_layers

__all__ = [
    "merge_tensors",
    "pad_tensors",
    "partial_rename",
    "split_tensor",
    "stack_layers",
    "transpose_tensors",
    "unpad_tensors",
    "unstack_layers",
]

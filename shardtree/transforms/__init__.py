"""Pure functions on flat trees: stacking and keeping layers, splitting, merging and padding tensors, renaming keys.

An open checkpoint is a flat tree. Lazy tensors aren't read: operations on them are recorded.
"""

from ._pad import pad_tensors, transpose_tensors, unpad_tensors
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

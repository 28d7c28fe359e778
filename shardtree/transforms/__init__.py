"""Pure functions from one naming of tensors to another: layers stacked, tensors cut, joined, padded, keys renamed.

They take and give flat trees, as an open checkpoint is one, and only record what they do to lazy tensors.
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

"""The memory of leaves' tensors: whether it is what a leaf says, and may be written in place."""

from ._apart import check_apart as check_apart
from ._given import check_unchanged as check_unchanged
from ._given import check_writable as check_writable
from ._given import given_tensor as given_tensor
from ._given import lacks_memory as lacks_memory

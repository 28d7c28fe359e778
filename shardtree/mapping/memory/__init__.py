"""The memory of leaves' tensors: whether it is what a leaf says, and may be written in place."""

from .._data import SHAPE_FIX as SHAPE_FIX
from .._data import check_has_shape as check_has_shape
from .._data import without_shape as without_shape
from ._apart import check_apart as check_apart
from ._given import check_unchanged as check_unchanged
from ._given import check_writable as check_writable
from ._given import given_tensor as given_tensor
from ._given import has_elements as has_elements
from ._given import lacks_memory as lacks_memory

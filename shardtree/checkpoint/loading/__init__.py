"""Loading: a target is taken apart, checked against what is stored, filled, and put together."""

import typing

from ._load import load_plain_tensors
from ._strict import StrictHandling

if typing.TYPE_CHECKING:
    from ._typed import load
else:
    from ._load import load

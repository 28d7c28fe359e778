"""Live resharding: tensors move from ranks that hold them to ranks that want them, without files."""

import typing

from ._memory import make_buffers
from ._move import Route, Transport, long_pieces_apart, move

if typing.TYPE_CHECKING:
    from ._redistribute import redistribute
else:
    from .._deferred import later

    # A load moves what ranks read for each other, and needs neither lenses nor traces for that.
    __getattr__ = later(__name__, {"redistribute": "._redistribute"})

__all__ = [
    "Transport",
    "redistribute",
]

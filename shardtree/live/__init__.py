"""Live resharding: tensors move from ranks that hold them to ranks that want them, without files."""

from ._memory import make_buffers
from ._move import Route, Transport, move
from ._redistribute import redistribute

__all__ = [
    "Transport",
    "redistribute",
]

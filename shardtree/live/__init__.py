"""Live resharding: tensors move from ranks that hold them to ranks that want them, without files."""

import typing

__all__ = [
    "Transport",
    "redistribute",
]

if typing.TYPE_CHECKING:
    from ._memory import make_buffers
    from ._move import Route, Transport, long_pieces_apart, move
    from ._redistribute import redistribute
else:
    from .._deferred import later

    __getattr__ = later(
        __name__,
        {
            "Route": "._move",
            "Transport": "._move",
            "long_pieces_apart": "._move",
            "make_buffers": "._memory",
            "move": "._move",
            "redistribute": "._redistribute",
        },
    )

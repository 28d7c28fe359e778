"""Live resharding: tensors move from ranks that hold them to ranks that want them, without files."""

import typing

__all__ = [
    "Transport",
    "redistribute",
]

if typing.TYPE_CHECKING:
    from ._memory import make_buffers
    from ._move import Route, Transport, long_pieces_apart, move
    from ._reading import cuts_shards, foretold_exchange, foretold_groups
    from ._redistribute import redistribute
else:
    from ..core.deferred import later

    __getattr__ = later(
        __name__,
        {
            "Route": "._move",
            "Transport": "._move",
            "cuts_shards": "._reading",
            "foretold_exchange": "._reading",
            "foretold_groups": "._reading",
            "long_pieces_apart": "._move",
            "make_buffers": "._memory",
            "move": "._move",
            "redistribute": "._redistribute",
        },
    )

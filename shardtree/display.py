"""draw: the picture of a value, which prints in a terminal, shows in a notebook, and can be saved."""

from __future__ import annotations

import typing

from .core.deferred import face

__all__ = [
    "Drawing",
    "draw",
]

if typing.TYPE_CHECKING:
    from .pictures import draw
    from .pictures._display import Drawing
else:
    __getattr__, __dir__ = face(
        __name__,
        __all__,
        "..pictures._display",
        {
            "..pictures": "draw",
        },
    )

"""Ranks' parts of a model in safetensors files, as DCP and transformers' distributed checkpoints keep them."""

import typing

from ._listing import recognize

if typing.TYPE_CHECKING:
    from ._contents import read_contents
else:
    from ...kit import later

    __getattr__ = later(
        __name__,
        {
            "._contents": "read_contents",
        },
    )

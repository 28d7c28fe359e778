"""Ranks' parts of a model in safetensors files, the format of DCP and of transformers' distributed checkpoints."""

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

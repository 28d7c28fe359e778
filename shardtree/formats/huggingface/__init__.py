"""Hugging Face models: safetensors files of whole tensors, and the index JSON that lists them."""

import typing

from ._listing import recognize

if typing.TYPE_CHECKING:
    from ._save import MAX_FILE_BYTES, save_sharded_up_to
    from ._texts import without_framework
else:
    from ...kit import later

    __getattr__ = later(
        __name__,
        {
            "._save": "MAX_FILE_BYTES save_sharded_up_to",
            "._texts": "without_framework",
        },
    )

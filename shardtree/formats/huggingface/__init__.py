"""Hugging Face models: safetensors files with whole tensors, and the index JSON that lists them."""

import typing

from ._listing import recognize

if typing.TYPE_CHECKING:
    from ._listing import ModelListing
    from ._load import WeightFile, check_numbers, read_headers, refusal
    from ._save import MAX_FILE_BYTES, save_sharded_up_to
    from ._texts import TEXTS, joined_texts, without_framework
else:
    from ...kit import later

    __getattr__ = later(
        __name__,
        {
            "._listing": "ModelListing",
            "._load": "WeightFile check_numbers read_headers refusal",
            "._save": "MAX_FILE_BYTES save_sharded_up_to",
            "._texts": "TEXTS joined_texts without_framework",
        },
    )

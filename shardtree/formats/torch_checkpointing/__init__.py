"""Folders of torch_checkpointing, which torchtitan adopts after DCP: a file of torch.save for each item and rank."""

import typing

from ._listing import by_item, recognize

if typing.TYPE_CHECKING:
    from ._contents import Listing, listed, read_contents
else:
    from ...kit import later

    __getattr__ = later(
        __name__,
        {
            "._contents": "Listing listed read_contents",
        },
    )

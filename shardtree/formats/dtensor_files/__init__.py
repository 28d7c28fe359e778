"""Files of ranks with their parts of DTensors, as verl and hand-written FSDP2 loops save them with torch.save."""

import typing

from ._listing import PATTERNS, RankFiles, rank_files, recognize

if typing.TYPE_CHECKING:
    from ._contents import Entries, read_contents
else:
    from ...kit import later

    __getattr__ = later(
        __name__,
        {
            "._contents": "Entries read_contents",
        },
    )

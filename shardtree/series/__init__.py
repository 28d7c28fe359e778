"""Series: the steps of a run under one root: listing, saving, resuming, and removal by a policy after a dry run."""

import typing

if typing.TYPE_CHECKING:
    from ._listing import FileMark
    from ._removal import Removal, StepFiles
    from ._series import CheckpointSeries
else:
    from ..core.deferred import later

    __getattr__ = later(
        __name__,
        {
            "._listing": "FileMark",
            "._removal": "Removal StepFiles",
            "._series": "CheckpointSeries",
        },
    )

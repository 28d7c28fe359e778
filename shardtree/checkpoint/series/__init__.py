"""Series: the steps of a run under one root, listed, saved, resumed from, and removed by a policy, after a dry run."""

from ._listing import FileMark
from ._removal import Removal, StepFiles
from ._series import CheckpointSeries

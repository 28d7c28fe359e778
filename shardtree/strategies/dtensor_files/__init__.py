"""A file for each rank with its parts of DTensors, as verl and hand-written FSDP2 loops save them with torch.save."""

from .._actions import StoredRows, StrategyAction
from .._traits import FormatTraits
from ._listing import PATTERNS, recognize

_ACTIONS = ("load_common", "load_sharded", "load_objects", "load_metadata", "verify", "resolve")

ROWS: StoredRows = {
    (StrategyAction.RECOGNIZE, "dtensor_files", 1): recognize,
    (StrategyAction.DESCRIBE, "dtensor_files", 1): lambda: FormatTraits(decided_by=PATTERNS),
    **{(StrategyAction(action), "dtensor_files", 1): f"dtensor_files._contents:{action}" for action in _ACTIONS},
}

"""torch_checkpointing's folders, to which torchtitan moves from DCP: a file of torch.save for each item and rank."""

from .._actions import StoredRows, StrategyAction
from .._traits import FormatTraits
from ._listing import METADATA, PATTERN, recognize

_ACTIONS = ("load_common", "load_sharded", "load_objects", "load_metadata", "verify", "resolve")

ROWS: StoredRows = {
    (StrategyAction.RECOGNIZE, "torch_checkpointing", 1): recognize,
    (StrategyAction.DESCRIBE, "torch_checkpointing", 1): lambda: FormatTraits(decided_by=(METADATA, PATTERN)),
    **{
        (StrategyAction(action), "torch_checkpointing", 1): f"torch_checkpointing._contents:{action}"
        for action in _ACTIONS
    },
}

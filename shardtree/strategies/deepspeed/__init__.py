"""DeepSpeed's checkpoints: ZeRO-1, 2 and 3, and its Universal Checkpoint."""

from .._actions import StoredRows, StrategyAction
from .._traits import FormatTraits
from ._listing import LATEST, ZERO, recognize

_ACTIONS = ("load_common", "load_sharded", "load_objects", "load_metadata", "explain", "verify")

ROWS: StoredRows = {
    (StrategyAction.RECOGNIZE, *ZERO): recognize,
    (StrategyAction.DESCRIBE, *ZERO): lambda: FormatTraits(
        decided_by=(LATEST, "*_model_states.pt", "*_optim_states.pt")
    ),
    **{(StrategyAction(action), *ZERO): f"deepspeed._contents:{action}" for action in _ACTIONS},
}

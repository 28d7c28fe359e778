"""DeepSpeed's checkpoints: ZeRO-1, 2 and 3, and its Universal Checkpoint."""

from .._actions import StoredRows, StrategyAction
from .._traits import FormatTraits
from ..archives import ACTIONS
from ._listing import LATEST, LATEST_UNIVERSAL, UNIVERSAL, ZERO, recognize, recognize_universal

_DECIDED_BY = (LATEST, LATEST_UNIVERSAL, "*_model_states.pt", "*_optim_states.pt")

ROWS: StoredRows = {
    (StrategyAction.RECOGNIZE, *ZERO): recognize,
    (StrategyAction.DESCRIBE, *ZERO): lambda: FormatTraits(decided_by=_DECIDED_BY),
    (StrategyAction.RECOGNIZE, *UNIVERSAL): recognize_universal,
    (StrategyAction.DESCRIBE, *UNIVERSAL): lambda: FormatTraits(decided_by=_DECIDED_BY),
    **{(action, *ZERO): f"deepspeed._contents:{action.value}" for action in ACTIONS},
    **{(action, *UNIVERSAL): f"deepspeed._universal:{action.value}" for action in ACTIONS},
}

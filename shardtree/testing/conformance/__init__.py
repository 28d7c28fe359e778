"""Everything that a backend's rows promise, tried case by case: `check_strategy` for whoever registers one."""

from ._report import RefusedCase as RefusedCase
from ._report import StrategyReport as StrategyReport
from ._suite import check_strategy as check_strategy

"""`check_strategy`: tests for backends, which try case by case everything that a backend's rows promise."""

from ._report import RefusedCase as RefusedCase
from ._report import StrategyReport as StrategyReport
from ._suite import check_strategy as check_strategy

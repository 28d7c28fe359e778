"""`check_strategy`: tests for backends, which try case by case everything that a backend's rows promise."""

from ._report import RefusedCase, StrategyReport
from ._suite import check_strategy

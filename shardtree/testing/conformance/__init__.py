"""`check_strategy`: tests for backends, which try case by case everything that a backend's rows promise."""

from ._suite import RefusedCase, StrategyReport, check_strategy

"""`check_strategy`: a test suite that tries, case by case, what a backend's functions in the dispatch table promise."""

from ._suite import RefusedCase, StrategyReport, check_strategy

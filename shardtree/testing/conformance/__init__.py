"""`check_strategy`: a test suite for backends; it tries case by case what a backend's dispatch-table rows promise."""

from ._suite import RefusedCase, StrategyReport, check_strategy

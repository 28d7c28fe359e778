"""A pytest plugin for runs on mutants: leaves out the doctests of a mutant's copy of a docstring."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what isn't a copy."""
    copies = [item for item in items if "__mutmut_" in item.name]
    if copies:
        config.hook.pytest_deselected(items=copies)
        items[:] = [item for item in items if "__mutmut_" not in item.name]

"""What the tests of buffers share: planted faults that a law must catch by an assertion, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st


def assert_caught(law: Callable[..., None], fault: Any, *strategies: st.SearchStrategy[Any]) -> None:
    """Assert that a law's own assertion fails for a faulty function."""

    @settings(phases=[Phase.generate], database=None, max_examples=300, derandomize=True, report_multiple_bugs=False)
    @given(st.tuples(*strategies))
    def run(arguments: tuple[Any, ...]) -> None:
        law(fault, *arguments)

    with pytest.raises(AssertionError):
        run()

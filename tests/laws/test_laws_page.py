"""laws.md names tests that exist, and every test of this folder's laws."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "tests" / "laws" / "laws.md").read_text()


def named(page: str) -> set[tuple[str, str]]:
    return set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page))


def missing(tests: set[tuple[str, str]]) -> list[str]:
    """Return the named tests that aren't there."""
    return sorted(f"{path}::{name}" for path, name in tests if name not in functions(ROOT / path))


@cache
def functions(path: Path) -> set[str]:
    if not path.exists():
        return set()
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.slow
def test_each_named_test_exists() -> None:
    assert named(PAGE)
    assert missing(named(PAGE)) == []


def test_a_name_without_a_test_is_found() -> None:
    row = "| a law | `tests/laws/test_gone.py::test_gone` | `tests/laws/test_laws_page.py::test_gone` |"
    assert missing(named(row)) == ["tests/laws/test_gone.py::test_gone", "tests/laws/test_laws_page.py::test_gone"]


def test_the_page_names_each_file_of_laws() -> None:
    files = {f"tests/laws/{path.name}" for path in Path(__file__).parent.glob("test_*.py")}
    assert files - {path for path, _ in named(PAGE)} == {"tests/laws/test_laws_page.py"}


def without_a_fault(page: str) -> list[str]:
    """Return the rows of laws whose last column is empty."""
    return [line for line in page.splitlines() if re.fullmatch(r"\|.*`tests/.*\|\s*\|", line)]


def test_each_law_has_a_planted_fault() -> None:
    assert without_a_fault(PAGE) == []


def test_a_law_without_a_planted_fault_is_found() -> None:
    row = "| a law | `tests/laws/test_laws_page.py::test_a_law` | |"
    assert without_a_fault(f"{row}\n| a law | `tests/laws/test_laws_page.py::test_a_law` | the same |") == [row]

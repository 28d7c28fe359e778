"""The rule by which mutants of prose are left out takes those, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation.prose import prose_mutants


@pytest.mark.parametrize(
    ("original", "mutant", "is_prose"),
    [
        ('raise ValueError("not a tree")', 'raise ValueError("XXnot a treeXX")', True),
        ('fix = "Flatten it."', 'fix = "FLATTEN IT."', True),
        ('fix = "Flatten it."', "fix = None", False),
        ('return kind == "stable"', 'return kind == "STABLE"', False),
        ('return ", ".join(names)', 'return "XX, XX".join(names)', False),
        ('f("a tree", 1)', 'f("XXa treeXX", 2)', False),
        ('f("a tree", 1)', 'f("a tree")', False),
        ("return 1", "return 2", False),
    ],
)
def test_only_texts_of_two_words_or_more_are_left_out(
    tmp_path: Path, original: str, mutant: str, is_prose: bool
) -> None:
    file = tmp_path / "module.py"
    file.write_text(f"def x_f__mutmut_orig():\n    {original}\n\n\ndef x_f__mutmut_1():\n    {mutant}\n")
    assert prose_mutants(file) == ({"x_f__mutmut_1"} if is_prose else set())

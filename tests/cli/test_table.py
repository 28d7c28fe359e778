"""Tables: columns line up, long keys are folded on a terminal only, and no character is lost."""

from __future__ import annotations

import re
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from shardtree.cli._names import size_named
from shardtree.cli._output import Heading, printable, show_table, size
from tests.core.trees.samples import assert_caught

NUMBERS = st.integers(0, 10**12).map(str)
HEADINGS = (Heading("key"), Heading("n", right=True), Heading("what"))
KEYS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Mn", "Me", "Cf"]), min_size=1, max_size=60)
ROWS = st.lists(st.tuples(KEYS, NUMBERS, st.sampled_from(["", "flat (x)"])), min_size=1, max_size=5)
PLAIN_ROWS = st.lists(
    st.tuples(st.text("ab.量", min_size=1, max_size=60), NUMBERS, st.just("")), min_size=1, max_size=5
)
Show = Callable[..., None]


def table(
    rows: list[tuple[str, str, str]], *, width: int, terminal: bool, limit: int | None = None, show: Show = show_table
) -> list[str]:
    """Return the lines of a table, below its heading and without escape sequences."""
    out = StringIO()
    show(
        Console(file=out, force_terminal=terminal, width=width, color_system=None, soft_wrap=True),
        HEADINGS,
        rows,
        limit,
    )
    return out.getvalue().split("\n")[2:-1]


def check_lines(show: Show, rows: list[tuple[str, str, str]]) -> None:
    lines = table(rows, width=20, terminal=False, show=show)
    assert len(lines) == len(rows)
    ends = set()
    for line, (key, number, what) in zip(lines, rows, strict=True):
        assert line.startswith(printable(key).rstrip())
        assert line.endswith(what or number)
        ends.add(cell_len(line[: line.rindex(number) + len(number)]))
    assert len(ends) == 1


def check_folds(show: Show, rows: list[tuple[str, str, str]]) -> None:
    lines = table(rows, width=45, terminal=True, show=show)
    assert all(cell_len(line) <= 45 for line in lines)
    assert re.sub(r"[\d\s]", "", "".join(lines)) == "".join(key for key, _, _ in rows)


def cut(console: Console, headings: Any, rows: list[tuple[str, str, str]], limit: int | None) -> None:
    """Show keys as far as there is room, as many programs do."""
    show_table(console, headings, [(key[:8], *rest) for key, *rest in rows], limit)


@given(ROWS)
def test_without_a_terminal_each_row_is_one_line_that_has_all_of_it(rows: list[tuple[str, str, str]]) -> None:
    check_lines(show_table, rows)


@given(PLAIN_ROWS)
def test_on_a_terminal_folded_keys_join_to_what_they_were(rows: list[tuple[str, str, str]]) -> None:
    check_folds(show_table, rows)


def test_keys_that_are_cut_off_are_caught() -> None:
    assert_caught(check_lines, cut, ROWS)
    assert_caught(check_folds, cut, PLAIN_ROWS)


def test_a_long_key_goes_on_in_the_next_line() -> None:
    assert table([("k" * 30, "7", "x")], width=25, terminal=True) == [f"{'k' * 16}  7  x", "k" * 14]


def test_a_limit_says_how_many_more_there_are() -> None:
    rows = [("a", "1", "x")] * 1200
    assert table(rows, width=80, terminal=False, limit=1) == ["a    1  x", "and 1,199 more"]


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "1e3", "1 apple", "0", "0.1", "١٢", "1" * 40])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="not a number of bytes"):
        size_named(text)


@given(st.integers(1, 999), st.sampled_from(["", "kB", "MB", "GB"]))
def test_a_size_is_read_as_it_is_written(count: int, unit: str) -> None:
    written = f"{count} {unit or 'B'}"
    assert size(size_named(written)) in (written, written.replace(" ", ".0 "))

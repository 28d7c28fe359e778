"""The kit: each of its names is on the page about writing a backend, and what is written from that page works."""

from __future__ import annotations

import ast
import types

import pytest

import shardtree as st
from shardtree import kit
from shardtree.testing import check_strategy
from tests.docs import kit_table
from tests.docs.test_blocks import fences


def npy_format() -> str:
    """Return the page's format with an index of its own."""
    section = kit_table.PAGE.read_text().partition("## A format with an index of its own\n")[2]
    return fences(section)[0][2]


def test_the_groups_have_every_name_once() -> None:
    assert [name for names in kit_table.groups().values() for name in names] == kit.__all__
    assert len(kit.__all__) == len({*kit.__all__})


def test_the_page_says_a_line_about_every_name() -> None:
    assert kit_table.PAGE.read_text() == kit_table.page(), "write it anew: python -m tests.docs.kit_table"
    assert [name for name in kit.__all__ if not kit_table.summary(name)] == []


def test_the_npy_format_imports_nothing_of_ours_but_the_kit() -> None:
    imports = [node for node in ast.walk(ast.parse(npy_format())) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports}
    assert modules == {"io", "json", "numpy", "shardtree.kit"}


@pytest.mark.slow
def test_the_npy_format_keeps_its_promises() -> None:
    module = types.ModuleType("npy")
    exec(npy_format(), vars(module))
    report = check_strategy("npy", 1, strategies=st.default_strategies | module.NPY)
    assert report.refused == ()
    assert "a checkpoint is replaced as a whole, and only when asked" in report.kept
    assert report.left_out["metadata names every object"] == "no row for load_objects"

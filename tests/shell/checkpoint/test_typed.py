"""What type checkers see of `save` and `load` has the parameters that they have."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardtree as st

STUBS = {st.save: "saving", st.load: "loading"}


def seen(tree: ast.Module, name: str) -> list[tuple[list[str], list[str]]]:
    """Return the parameters of each overload by place, and those by name alone."""
    (keywords,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    named = [
        each.target.id
        for each in keywords.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    ]
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return [([each.arg for each in one.args.args], named) for one in functions]


@pytest.mark.parametrize("function", STUBS)
def test_overloads_have_the_parameters_of_their_function(function: Callable[..., Any]) -> None:
    stub = Path(st.__file__).parent / "shell" / "checkpoint" / STUBS[function] / "_typed.pyi"
    parameters = inspect.signature(function).parameters.values()
    by_place = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    by_name = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    overloads = seen(ast.parse(stub.read_text()), function.__name__)
    assert len(overloads) > 1 and all(each == (by_place, by_name) for each in overloads)

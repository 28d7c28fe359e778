"""Which mutants are left out by rule: those that change nothing but a text of two words or more."""

from __future__ import annotations

import ast
import re
from itertools import zip_longest
from pathlib import Path

TWO_WORDS = re.compile(r"\w[\w']*[,.:;]? +\w")


def prose_mutants(file: Path) -> set[str]:
    """Return the names of those mutants in a file that mutmut made."""
    functions = {node.name: node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}
    names = (name.partition("__mutmut_") for name in functions)
    return {
        "".join(name)
        for name in names
        if name[2].isdigit() and changes_prose_alone(functions[f"{name[0]}__mutmut_orig"], functions["".join(name)])
    }


def changes_prose_alone(original: ast.FunctionDef, mutant: ast.FunctionDef) -> bool:
    """Return whether all that differs between two functions is one text, of two words or more."""
    different = [pair for pair in zip_longest(leaves(original.body), leaves(mutant.body)) if pair[0] != pair[1]]
    if len(different) != 1:
        return False
    before, after = different[0]
    return isinstance(before, str) and isinstance(after, str) and TWO_WORDS.search(before) is not None


def leaves(value: object) -> list[object]:
    """Return what a piece of syntax consists of, in order: the kinds of its nodes, and the values in them."""
    if isinstance(value, list):
        return [*(leaf for part in value for leaf in leaves(part)), len(value)]
    if isinstance(value, ast.AST):
        return [type(value), *(leaf for _, part in ast.iter_fields(value) for leaf in leaves(part))]
    return [value]

"""The list of the kit's names on the page about writing a backend: `python -m tests.docs.kit_table` writes it anew."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tokenize
from collections.abc import Iterator
from io import StringIO
from itertools import pairwise
from pathlib import Path

import shardtree
from shardtree import kit

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-backend.md"
HEADING = "## The kit\n"
INTRODUCTION = """
Every name of `shardtree.kit`, as in `from shardtree import kit; help(kit.write_file)`. They may change with a note
in the changelog.
"""
NAMES_ONLY = {
    "Boxes and columns",
    "Dtypes, values and JSON",
    "What loads and saves refuse",
    "Findings of verify",
    "Storages",
}
"""Headings of groups whose names `help` explains: few formats need many of them."""


def groups() -> dict[str, list[str]]:
    """Return the names of the kit by the sentence above their group in its list."""
    text = Path(str(kit.__file__)).read_text()
    inside = text[text.index("__all__ = [") : text.index("\n]\n")]
    found: dict[str, list[str]] = {}
    sentence: list[str] = []
    for token in tokenize.generate_tokens(StringIO(inside.partition("\n")[2] + "\n").readline):
        if token.type == tokenize.COMMENT:
            sentence.append(token.string.removeprefix("# "))
        elif token.type == tokenize.STRING:
            if sentence:
                group = found.setdefault(" ".join(sentence), [])
                sentence = []
            group.append(ast.literal_eval(token.string))
    return found


def constant_text(name: str) -> str:
    """Return the text below the assignment of a constant, in whichever of our modules makes it."""
    for path in sorted(Path(str(shardtree.__file__)).parent.rglob("*.py")):
        text = path.read_text()
        if not re.search(rf"^{name}\b.* = ", text, re.MULTILINE):
            continue
        for line, below in pairwise(ast.parse(text).body):
            target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
            if isinstance(target, ast.Name) and target.id == name and isinstance(below, ast.Expr):
                return str(ast.literal_eval(below.value))
    return ""


def summary(name: str) -> str:
    """Return the first sentence that the library says of a name."""
    value = getattr(importlib.import_module("shardtree.kit"), name)
    own = (
        inspect.isroutine(value)
        or inspect.ismodule(value)
        or (inspect.isclass(value) and value.__module__.startswith("shardtree"))
    )
    text = (inspect.getdoc(value) if own else constant_text(name)) or ""
    sentence = " ".join(text.split("\n\n")[0].split()).removeprefix("Return ")
    sentence = re.split(r"; |\. (?=[A-Z\"])", sentence)[0].rstrip(":;.")  # `help` says the rest
    return sentence[:1].upper() + sentence[1:]


def lines() -> Iterator[str]:
    """Yield the lines of the section."""
    for sentence, names in groups().items():
        heading, _, rest = sentence.rstrip(".").partition(":")
        yield f"\n**{heading}**{rest and ':'}{rest}\n"
        if heading in NAMES_ONLY:
            yield ", ".join(f"`{name}`" for name in names) + "."
        else:
            yield from (f"- `{name}`: {summary(name)}" for name in names)


def page() -> str:
    """Return the whole page, with the sections that it has before the kit's."""
    return PAGE.read_text().partition(HEADING)[0] + HEADING + INTRODUCTION + "\n".join(lines()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())

"""docs/api.md below its introduction, made of the library itself: `python -m tests.docs.api_page` writes it anew."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import shardtree
from shardtree._later import NAMES, ROOMS

PAGE = Path(__file__).parents[2] / "docs" / "api.md"

GROUPS = {
    "Leaves": ("mapping",),
    "Trees": ("trees", "lazy", "interop.dtensor"),
    "Layouts": ("layouts", "display"),
    "Saving and loading": ("checkpoint",),
    "Resharding in memory": ("plans", "live"),
    "Strategies and options": ("strategies",),
    "Maps of models": ("traces",),
    "Worlds and errors": ("world", "errors"),
}
"""Headings of the root's names, by the rooms that these are of."""

TWINS = """
Each error class has a remote twin, `Remote…`, such as `RemoteKeyMismatch`. Every rank raises it where a call failed on
some ranks, all by that error. `WorldError` and `CheckpointingException` have none."""


def package_modules(room: str) -> Iterator[str]:
    """Yield the names of a room's modules; those of a face are in the rooms that it takes names from."""
    module = importlib.import_module(f"shardtree.{room}")
    yield module.__name__
    imported = [
        node for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())) if isinstance(node, ast.ImportFrom)
    ]
    sources = {f"shardtree.{node.module}" for node in imported if node.level and node.module}
    is_face = any(alias.name == "face" for node in imported for alias in node.names)
    for package in map(importlib.import_module, sorted(sources) if is_face else [module.__name__]):
        yield package.__name__
        for found in pkgutil.walk_packages(getattr(package, "__path__", []), f"{package.__name__}."):
            yield found.name


@cache
def texts_of_values(room: str) -> dict[str, str]:
    """Return the text below each assignment of a room's modules, by its name: what a constant has for a docstring."""
    found = dict[str, str]()
    for name in package_modules(room):
        spec = importlib.util.find_spec(name)
        body = ast.parse(Path(str(spec and spec.origin)).read_text()).body
        for line, below in pairwise(body):
            targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                for target in targets:
                    if isinstance(target, ast.Name):
                        found.setdefault(target.id, str(below.value.value))
    return found


def text_of(room: str, name: str) -> str:
    """Return what is said of a public name, in a few words."""
    value = getattr(importlib.import_module(f"shardtree.{room}"), name)
    own = inspect.isroutine(value) or inspect.isclass(value) or isinstance(value, ModuleType)
    text = texts_of_values(room).get(name) or (inspect.getdoc(value) if own else None) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence = re.match(r".*?[.:;](?= [A-Z]|$)", paragraph)
    whole = (sentence[0] if sentence else paragraph).rstrip(":;.")
    # What comes before a colon says what it is, unless that is a word or two; functions return, as all do.
    first = re.split(r"[:;] ", whole)[0]
    short = (first if len(first.split()) > 4 else whole).removeprefix("Return ")
    return short[0].upper() + short[1:]


def names_of(room: str) -> list[str]:
    """Return a room's public names."""
    return list(importlib.import_module(f"shardtree.{room}").__all__)


def room_of(name: str) -> str:
    """Return the room that one of the root's names is of."""
    return next(room.removeprefix("core.") for room, names in NAMES.items() if name in names.split())


def is_twin(room: str, name: str) -> bool:
    """Return whether a name is of the class that ranks raise for an error of some rank."""
    return room == "errors" and name.removeprefix("Remote") in {*names_of(room)} - {name}


def lines() -> Iterator[str]:
    """Yield the page's lines after its introduction."""
    root = [name for name in shardtree.__all__ if not isinstance(getattr(shardtree, name), ModuleType)]
    yield "## The root: `st`"
    for heading, rooms in GROUPS.items():
        yield f"\n### {heading}\n"
        yield from (f"- `{name}`: {text_of(room_of(name), name)}." for name in root if room_of(name) in rooms)
    for room in ROOMS:
        module = importlib.import_module(f"shardtree.{room}")
        rest = [name for name in names_of(room) if name not in root and not is_twin(room, name)]
        if rest:
            yield f"\n## `st.{room}`\n"
            first = " ".join((module.__doc__ or "").split("\n\n")[0].split())
            yield f"{re.split(r'(?<=[.]) (?=[A-Z])', first)[0]}\n"
            yield from (f"- `{name}`: {text_of(room, name)}." for name in rest)
        if room == "errors":
            yield TWINS


def page() -> str:
    """Return the whole page, with the introduction that it has."""
    introduction = PAGE.read_text().partition("## The root")[0]
    return introduction + "\n".join(lines()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())

"""Public names: docs/api.md has a line for each but remote errors, and what signatures mention is public too."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, get_args, get_type_hints

import shardtree
from shardtree._later import ROOMS
from tests.docs import api_page

ROOM = {room: importlib.import_module(f"shardtree.{room}") for room in ROOMS}
EXPORTED = {f"{name}": getattr(shardtree, name) for name in shardtree.__all__}
PUBLIC = EXPORTED | {f"{room}.{name}": getattr(ROOM[room], name) for room in ROOMS for name in ROOM[room].__all__}
FUNCTIONS = [name for name, value in PUBLIC.items() if inspect.isfunction(value)]
CLASSES = [name for name, value in PUBLIC.items() if inspect.isclass(value) and "[" not in repr(value)]
# What needs processes, is drawn by Hypothesis, or is a law, whose tests are its examples.
WITHOUT_EXAMPLE = {"distributed", "world.distributed"}


def test_the_root_fits_a_page() -> None:
    assert len(shardtree.__all__) <= 88


def test_the_page_is_as_the_library_says() -> None:
    fix = "write it anew: python -m tests.docs.api_page"
    assert api_page.PAGE.read_text() == api_page.page(), fix


def test_a_page_shows_or_says_what_each_name_is() -> None:
    # What no page needs is for our own rooms, and isn't in `__all__`.
    pages = [
        page
        for page in (*api_page.PAGE.parent.glob("*.md"), api_page.PAGE.parents[1] / "README.md")
        if page != api_page.PAGE
    ]
    code = " ".join(
        found for page in pages for found in re.findall(r"```.*?```|`[^`\n]+`", page.read_text(), re.DOTALL)
    )
    # Errors of other ranks are those errors, with the ranks that raised them.
    names = {name.rpartition(".")[2] for name, value in PUBLIC.items() if not isinstance(value, ModuleType)}
    names -= {f"Remote{name}" for name in names}
    assert sorted(names - {*re.findall(r"\w+", code)}) == []


def unlike(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names in whose docstring a pattern isn't found."""
    found = re.compile(pattern, re.MULTILINE | re.DOTALL)
    return [name for name in names if not found.search(inspect.getdoc(PUBLIC[name]) or "")]


def test_a_docstring_begins_with_a_sentence() -> None:
    assert unlike(r"\A[A-Z`(].*?[.:](\s|\Z)", FUNCTIONS + CLASSES) == []


def test_a_function_shows_an_example_that_runs() -> None:
    ours = [name for name in FUNCTIONS if name not in WITHOUT_EXAMPLE and not name.startswith("testing.")]
    assert unlike(r"^Examples:\n +>>> ", ours) == []


def untyped(function: Any) -> list[str]:
    """Return the parameters without a type; "return" stands for what is returned."""
    named = [p.name for p in inspect.signature(function).parameters.values() if p.annotation is p.empty]
    return named + ["return"] * ("return" not in function.__annotations__)


def test_a_function_is_typed() -> None:
    assert {name: found for name in FUNCTIONS if (found := untyped(PUBLIC[name]))} == {}


def kinds_in(hint: Any) -> Iterator[type]:
    """Yield the classes that a type mentions."""
    if inspect.isclass(hint):
        yield hint
    for part in get_args(hint):
        yield from kinds_in(part)


def mentioned(value: Any) -> set[type]:
    """Return our classes that the signature of a function, or of a class's constructor and methods, mentions."""
    functions = [value] if inspect.isfunction(value) else []
    if inspect.isclass(value):
        members = ((name, inspect.unwrap(member)) for name, member in vars(value).items() if not name.startswith("_"))
        functions = [member for _, member in members if inspect.isfunction(member)]
        if dataclasses.is_dataclass(value):
            functions.append(value)
    hints = [hint for function in functions for hint in get_type_hints(function).values()]
    return {kind for hint in hints for kind in kinds_in(hint) if kind.__module__.startswith("shardtree")}


# What these return follows the protocols `Reader` and `Sibling`; nobody makes a LazyTensor by hand.
WITHIN = {"LazyTensor", "storage.LocalStorage", "storage.MemoryStorage"}
# Types of functions that Hypothesis has made can't be resolved.
SIGNED = [name for name in FUNCTIONS if not name.startswith("testing.")] + CLASSES


def test_what_a_signature_mentions_is_public() -> None:
    known = {id(value) for value in PUBLIC.values() if not isinstance(value, ModuleType)}
    kinds = {name: mentioned(PUBLIC[name]) for name in SIGNED if name not in WITHIN}
    assert {(name, kind) for name, found in kinds.items() for kind in found if id(kind) not in known} == set()

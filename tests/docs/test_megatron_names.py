"""docs/megatron.md: no name of the installed Megatron-Core is left out, and each of ours exists."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardtree
from shardtree._later import ROOMS
from tests.peers.megatron_versions import has, source_of

PAGE = Path(__file__).parents[2] / "docs" / "megatron.md"
NOT_ABOUT_CHECKPOINTS = {"logger"}


def sections() -> dict[str, list[tuple[str, str, str]]]:
    """Return module -> its rows, as (Megatron-Core's cell, our cell, the releases that have the name)."""
    parts = re.split(r"^### `([\w.]+)`$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return {module: list(rows(text)) for module, text in zip(parts[::2], parts[1::2], strict=True)}


def rows(text: str) -> Iterator[tuple[str, str, str]]:
    span = r"((?:until|since) 0\.\d+)?"
    for since, names in re.findall(rf"^The same(?:, {span})?: (.*)\.$", text, re.MULTILINE):
        yield from ((name, f"`{name}`", since) for name in re.findall("`([^`]+)`", names))
    for names, cell, since in re.findall(rf"^\| (`.+?`) \| (.+?) \| {span}", text, re.MULTILINE):
        yield from ((name, cell, since) for name in re.findall("`([^`]+)`", names))


def installed() -> dict[str, list[tuple[str, str]]]:
    """Return module -> its rows, as (Megatron-Core's cell, our cell), of the names that the installed release has."""
    return {module: [(name, cell) for name, cell, span in rows if has(span)] for module, rows in sections().items()}


def defined(body: list[ast.stmt]) -> set[str]:
    """Return the public names that a module or class body defines, with its classes' methods and enum members."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ClassDef):
            fields = {part for part in node.body if isinstance(part, ast.AnnAssign)}
            members = defined([part for part in node.body if part not in fields])
            names |= {node.name} | {f"{node.name}.{member}" for member in members}
    return {name for name in names if not any(part.startswith("_") for part in name.split("."))}


ROOM_OF = {name: getattr(shardtree, room) for room in reversed(ROOMS) for name in getattr(shardtree, room).__all__}


def ours(name: str) -> object:
    value: object = shardtree if hasattr(shardtree, name.split(".")[0]) else ROOM_OF.get(name.split(".")[0], shardtree)
    for part in name.split("."):
        value = inspect.getattr_static(value, part) if isinstance(value, type) else getattr(value, part)
    return value


@pytest.mark.parametrize("module", sections())
def test_no_name_of_theirs_is_left_out_or_made_up(module: str) -> None:
    listed = [theirs for theirs, _ in installed()[module]]
    assert len(listed) == len(set(listed))
    present = defined(source_of(module).body) - NOT_ABOUT_CHECKPOINTS
    if module == "strategies.async_utils":  # its callers' methods are their own affair
        present = {name for name in present if not re.match(r"\w+AsyncCaller\.|AsyncCaller\.", name)}
    assert set(listed) == present


@pytest.mark.parametrize(
    "name",
    sorted({name for rows in sections().values() for _, cell, _ in rows for name in re.findall("`([^`]+)`", cell)}),
)
def test_each_name_of_ours_exists(name: str) -> None:
    ours(name)


def test_every_row_names_something_or_says_that_it_does_not() -> None:
    cells = [cell for rows in sections().values() for _, cell, _ in rows]
    assert [cell for cell in cells if not re.fullmatch(r"`[\w.]+`|—", cell)] == []


def test_a_name_that_does_not_exist_is_found() -> None:
    with pytest.raises(AttributeError):
        ours("ShardedTensor.wide")

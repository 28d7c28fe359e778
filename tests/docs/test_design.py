"""docs/design.md is a map that is true: its rooms are there, import as it says, and so a save and a load walk."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import shardtree as st
from tests.test_architecture import TEXTS, imports

PACKAGE = Path(st.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs" / "design.md").read_text()
# Longer than what is read without a plan.
TREE = {"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2**18 + 1)), "step": 1}

Place = tuple[str, str]


def section(title: str) -> str:
    """Return the page's text under a heading."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def steps_of(title: str) -> list[list[Place]]:
    """Return, for each numbered step of a walk, the (module, function) pairs that it names."""
    found = []
    for step in re.split(r"^\d\. ", section(title), flags=re.MULTILINE)[1:]:
        module, places = "", list[Place]()
        step = step.partition("\n\n")[0]  # what follows the last step is about other ways
        for path, function in re.findall(r"`([\w/]+\.py)`|`(\w+)`", step):
            module = path or module
            if function and module and (PACKAGE / module).exists() and defines(module, function):
                places.append((module, function))
        found.append(places)
    return found


def defines(module: str, function: str) -> bool:
    """Return whether a module has a function of that name."""
    return re.search(rf"^ *def {function}\(", (PACKAGE / module).read_text(), re.MULTILINE) is not None


def walked(action: Callable[[], Any]) -> dict[Place, int]:
    """Return which of our functions are called, each with the number of calls before its first one."""
    seen: dict[Place, int] = {}

    def watch(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            seen.setdefault((Path(code.co_filename).relative_to(PACKAGE).as_posix(), code.co_name), len(seen))

    before = sys.getprofile()
    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        action()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]
    return seen


def check_walk(title: str, seen: dict[Place, int]) -> None:
    """Raise unless every function that a walk names is called, and each step begins after the one before."""
    steps = steps_of(title)
    assert len(steps) == 6
    missing = [place for places in steps for place in places if place not in seen]
    assert missing == [], "the walk does not come by"
    firsts = [seen[places[0]] for places in steps]
    assert firsts == sorted(firsts), "steps come in another order"


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[Place, int]]:
    folder = tmp_path_factory.mktemp("walk")
    st.load(TREE, saved(folder / "before"))  # what is imported late is no part of the walk
    save = walked(lambda: saved(folder / "one"))
    load = walked(lambda: st.load(TREE, folder / "one"))
    return {"The walk of a save": save, "The walk of a load": load}


def saved(folder: Path) -> Path:
    st.save(TREE, folder)
    return folder


@pytest.mark.parametrize("title", ["The walk of a save", "The walk of a load"])
def test_a_walk_is_as_the_page_says(title: str, walks: dict[str, dict[Place, int]]) -> None:
    check_walk(title, walks[title])


@pytest.mark.parametrize("title", ["The walk of a save", "The walk of a load"])
def test_every_module_of_a_walk_is_there(title: str) -> None:
    paths = set(re.findall(r"`((?!tests/)[\w/]+\.py)`", section(title)))
    assert {path for path in paths if not (PACKAGE / path).exists()} == set()


def test_a_walk_that_goes_elsewhere_is_found(walks: dict[str, dict[Place, int]]) -> None:
    with pytest.raises(AssertionError):
        check_walk("The walk of a save", walks["The walk of a load"])


def rooms() -> Iterator[str]:
    """Yield what the page's list has to name: all that is directly inside of the package, of core and of shell."""
    split = [PACKAGE / "core", PACKAGE / "shell"]
    inside = [path for folder in split for path in folder.iterdir() if path.name != "__init__.py"]
    for path in [*PACKAGE.iterdir(), *inside]:
        name = path.relative_to(PACKAGE).as_posix()
        if path.suffix == ".py":
            yield name
        elif path not in split and (path / "__init__.py").exists():
            yield f"{name}/"


def listed_rooms() -> list[list[str]]:
    """Return the rooms that each row of the page's list names."""
    rows = re.findall(r"^- (`[^`]+`(?:, `[^`]+`)*): ", section("The rooms"), re.MULTILINE)
    return [re.findall(r"`([^`]+)`", row) for row in rows]


def test_the_list_has_every_room() -> None:
    assert sorted(name for row in listed_rooms() for name in row) == sorted(rooms())


def upward_imports(rows: list[list[str]]) -> list[tuple[str, str]]:
    """Return the (module, import) pairs where a module imports from a row below its own."""
    row_of = {re.sub(r"(/|\.py)$", "", name): number for number, row in enumerate(rows) for name in row}

    def row(name: str) -> int:
        parts = name.split("/")
        return next((row_of[at] for end in (2, 1) if (at := "/".join(parts[:end])) in row_of), -1)

    ours = {module: imports(text, module) for module, text in TEXTS.items() if row(module) >= 0}
    pairs = [(module, name) for module, names in ours.items() for name in names if name.startswith(".")]
    return [(module, name) for module, name in pairs if row(name[1:].replace(".", "/")) > row(module)]


def test_a_room_imports_from_rows_above_its_own() -> None:
    assert upward_imports(listed_rooms()) == []
    assert ("core/trees/_maps", ".core.lazy.LazyTensor") in upward_imports(listed_rooms()[::-1])


def test_every_folder_and_module_that_the_page_names_is_there() -> None:
    names = set(re.findall(r"`((?:[a-z_]+/)+|[\w/]+\.py)`", PAGE))
    assert len(names) > 80
    assert {name for name in names if not (PACKAGE / name).exists() and not (PACKAGE.parent / name).exists()} == set()

"""bad-input.md: every row raises what it says."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import shardtree as st

PAGE = (Path(__file__).parent / "bad-input.md").read_text()
ROW = re.compile(r"^\| `(.+?)` \| `(\w+)` \| (?:`` (.+) ``|`(.+)`) \|$", re.MULTILINE)
ROWS = [(given, kind, spaced or plain) for given, kind, spaced, plain in ROW.findall(PAGE)]
ENTRY_POINTS = [name for name in st.checkpoint.__all__ if hasattr(st, name)]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return a folder with what the page's block saves in it, and the names that the block makes."""
    folder = tmp_path_factory.mktemp("bad_input")
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(block, namespace)
    return folder, namespace


def complaint(given: str, folder: Path, namespace: dict[str, Any]) -> tuple[str, str]:
    """Return the name and the whole text, notes included, of what an expression raises."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        try:
            eval(given, namespace)
        except Exception as error:
            return type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", [])])
    return "nothing", ""


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning", "ignore:torch.*quant:DeprecationWarning")
@pytest.mark.parametrize(("given", "kind", "words"), ROWS, ids=[given for given, _, _ in ROWS])
def test_it_raises_what_the_page_says(given: str, kind: str, words: str, names: tuple[Path, dict[str, Any]]) -> None:
    found, text = complaint(given, *names)
    assert (found, words in text) == (kind, True), text


def test_every_line_of_the_tables_is_a_row() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith("|") and "---" not in line]
    assert len(ROWS) == len([line for line in lines if not line.startswith("| input |")]) > 100


@pytest.mark.parametrize("leaf", ["ShardedTensor", "ShardedObject", "ShardedTensorFactory"])
def test_every_constructor_is_tried(leaf: str) -> None:
    assert any(f"st.{leaf}" in given for given, _, _ in ROWS)


@pytest.mark.parametrize(
    "name", [name for name in dict.fromkeys(ENTRY_POINTS) if inspect.isfunction(getattr(st, name))]
)
def test_every_entry_point_is_tried(name: str) -> None:
    assert any(f"st.{name}(" in given for given, _, _ in ROWS)


def test_only_a_callers_own_errors_are_foreign() -> None:
    kinds = {kind for _, kind, _ in ROWS}
    assert {kind for kind in kinds if not hasattr(st.errors, kind)} == {"ZeroDivisionError", "IndexError"}


def test_nothing_of_it_leaves_a_checkpoint_behind(names: tuple[Path, dict[str, Any]]) -> None:
    folder, namespace = names
    before = sorted(path.relative_to(folder) for path in folder.rglob("metadata.json"))
    for given, _, _ in ROWS:
        if re.search(r"st\.save\(|st\.convert\(|united\(", given):
            complaint(given, folder, namespace)
    assert sorted(path.relative_to(folder) for path in folder.rglob("metadata.json")) == before
    assert list((folder / "new").glob("*")) == []


def test_a_wrong_row_is_found(names: tuple[Path, dict[str, Any]]) -> None:
    assert complaint("st.is_main_replica(0)", *names) == ("nothing", "")
    assert complaint("st.cast([shard], torch.int32)", *names)[0] != "TreeError"

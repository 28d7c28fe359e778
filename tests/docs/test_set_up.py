"""What people type first: the extras, their pinned versions, and the pages' commands for a set-up."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PAGES = ["README.md", "CONTRIBUTING.md", "docs/installing.md"]


def names(requirements: list[str]) -> set[str]:
    """Return the packages of requirements, without those that are ours."""
    return {re.split(r"[=<>\[ ]", line)[0] for line in requirements} - {"shardtree"}


def asked_for() -> set[str]:
    """Return all packages that the project or an extra asks for."""
    return names([*PROJECT["dependencies"], *(line for lines in EXTRAS.values() for line in lines)])


def pinned() -> set[str]:
    """Return the packages whose version is fixed for tests."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return names([line for line in lines if re.fullmatch(r"[\w-]+==[\w.]+", line)])


def test_extras_replace_nobodys_torch() -> None:
    assert not [line for lines in EXTRAS.values() for line in lines if "==" in line or "<" in line]
    assert not any("torch" in names(lines) for lines in EXTRAS.values())


def test_each_version_that_is_tested_is_pinned() -> None:
    assert asked_for() - pinned() == {"atheris"}  # has wheels for some platforms only
    assert pinned() <= asked_for()


@pytest.mark.parametrize("page", PAGES)
def test_extras_on_pages_exist(page: str) -> None:
    asked = re.findall(r"(?:'\.|shardtree|')\[([\w,]+)\]'?", (ROOT / page).read_text())
    assert {name for names in asked for name in names.split(",")} <= EXTRAS.keys()


def test_paths_in_contributing_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"`((?:shardtree|tests|docs|\.ci)/[\w./]*)`", text) + re.findall(r"\]\((\S+?)\)", text)
    assert len(paths) > 10 and not [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.parametrize("end", ["shardtree demo", "python -m tests"])
def test_the_command_that_ci_takes_from_the_readme_is_there_once(end: str) -> None:
    lines = re.findall(rf"^python3 -m venv \.venv .*{end}$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(lines) == 1 and "-c constraints.txt" in lines[0]

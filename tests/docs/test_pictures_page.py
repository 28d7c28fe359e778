"""docs/pictures/ has what docs/layouts.md makes: README shows it on GitHub, where nothing is built."""

from __future__ import annotations

import re

import pytest

from tests.docs.pictures import FOLDER, ROOT, drawn

SHOWN = re.compile(r"\]\((?:docs/)?pictures/([\w-]+\.svg)\)")


@pytest.mark.slow
def test_the_pictures_are_what_the_page_makes() -> None:
    kept = {path.name: path.read_text() for path in FOLDER.glob("*.svg")}
    assert kept == drawn(), "write them anew: python -m tests.docs.pictures"


def test_each_picture_is_shown_and_each_that_is_shown_is_there() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    shown = {name for page in pages for name in SHOWN.findall(page.read_text())}
    assert shown == {path.name for path in FOLDER.glob("*.svg")}

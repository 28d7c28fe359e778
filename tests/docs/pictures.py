"""The pictures of docs/, made by the blocks of docs/layouts.md: `python -m tests.docs.pictures` writes them anew."""

from __future__ import annotations

import os
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.docs.test_blocks import run_page

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "layouts.md"
FOLDER = ROOT / "docs" / "pictures"


def drawn() -> dict[str, str]:
    """Return the SVG of each picture that the page saves, by its file's name."""
    with TemporaryDirectory() as folder, chdir(folder):
        run_page(PAGE.read_text(), str(PAGE))
        return {name: Path(name).read_text() for name in sorted(os.listdir()) if name.endswith(".svg")}


def write() -> None:
    """Write those that have changed."""
    FOLDER.mkdir(exist_ok=True)
    for name, svg in drawn().items():
        path = FOLDER / name
        if not path.exists() or path.read_text() != svg:
            path.write_text(svg)


if __name__ == "__main__":
    write()

"""The entry point, which says what to install where the command line's libraries are missing."""

from __future__ import annotations

import sys
from importlib.util import find_spec

_LIBRARIES = ("typer", "rich")


def main() -> None:
    """Run the command that the arguments name, and leave with its exit status."""
    missing = [library for library in _LIBRARIES if find_spec(library) is None]
    if missing:
        needed = " and ".join(missing)
        sys.exit(f"shardtree: the command line needs {needed}. Install what it needs: pip install 'shardtree[cli]'")
    from ._app import app

    app(prog_name="shardtree")

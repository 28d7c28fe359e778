"""The entry point, which says what to install where the command line's libraries are missing."""

from __future__ import annotations

import sys

_LIBRARIES = {"typer", "rich", "click"}


def main() -> None:
    """Run the command that the arguments name, and leave with its exit status."""
    try:
        from ._app import app
    except ModuleNotFoundError as error:
        if error.name not in _LIBRARIES:
            raise
        sys.exit(f"shardtree: the command line needs {error.name}. Install it: pip install 'shardtree[cli]'")
    app(prog_name="shardtree")

"""The command line: `python -m shardtree`, or `shardtree`."""

import sys
import warnings
from importlib.util import find_spec

_LIBRARIES = ("typer", "rich")


def main() -> None:
    """Run the command that the arguments name, and exit with its status.

    If the command line's libraries are missing, the error says how to install them.
    """
    missing = [library for library in _LIBRARIES if find_spec(library) is None]
    if missing:
        packages = " and ".join(missing)
        sys.exit(f"shardtree: the command line needs {packages}. Install what it needs: pip install 'shardtree[cli]'")
    # Warnings are for the user of the command, for whom a line of our code means nothing.
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    # This is imported here, since it imports libraries that may be missing.
    from ._app import app

    app(prog_name="shardtree")

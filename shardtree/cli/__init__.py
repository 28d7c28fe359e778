"""The command line: `python -m shardtree`, or `shardtree`."""

import sys
import warnings
from importlib.util import find_spec

_LIBRARIES = ("typer", "rich")


def main() -> None:
    """Run the command that the arguments name, and leave with its exit status.

    Where the command line's libraries are missing, it says what to install.
    """
    missing = [library for library in _LIBRARIES if find_spec(library) is None]
    if missing:
        packages = " and ".join(missing)
        sys.exit(f"shardtree: the command line needs {packages}. Install what it needs: pip install 'shardtree[cli]'")
    # A warning is for the user of the command, who doesn't know the line of ours that warns.
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    # Imported here, since it imports what may be missing.
    from ._app import app

    app(prog_name="shardtree")

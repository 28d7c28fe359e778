"""The command line: `python -m shardtree`, or `shardtree`."""

from ._main import main as main

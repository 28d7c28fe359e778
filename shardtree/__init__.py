"""shardtree: a training job's sharded state as an immutable tree, saved in one layout and loaded in any other.

The data flows one way: **leaves** (`ShardedTensor`, `ShardedObject`, `ShardedTensorFactory`) are held in trees;
**tree maps** make new trees of them; a **plan** says which bytes go where; a **strategy** of the dispatch table runs
it; **bytes** land in a folder or in the target's memory. Everything before the strategy is pure.
"""

import typing

from . import _old_names

__version__ = "0.1.0"

_old_names.install()

# A type checker sees plain names, and no __getattr__, which would hide misspelt ones from it.
if typing.TYPE_CHECKING:
    from ._later import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        if name == "__all__":
            return _names()
        if name.startswith("_"):  # asked for by tools, which shouldn't have to wait for torch
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from ._later import NAMES, ROOMS
        from .core.deferred import import_quickly, later

        if name in ROOMS:
            return import_quickly(f".{name}", __name__)
        return later(__name__, {f".{room}": names for room, names in NAMES.items()})(name)

    def __dir__() -> list[str]:
        from ._later import ROOMS

        return sorted({*_names(), *ROOMS})

    def _names() -> list[str]:
        from ._later import NAMES

        return sorted(" ".join(NAMES.values()).split())

"""Asynchronous saves: snapshots, a thread that writes them, a queue that commits them in order, also at exit."""

import typing

if typing.TYPE_CHECKING:
    from ._exit import refuse_overlap
    from ._queue import AsyncCallsQueue, async_calls
    from ._snapshot import snapshot_shards
else:
    from ....core.deferred import later

    __getattr__ = later(
        __name__,
        {
            "._exit": "refuse_overlap",
            "._queue": "AsyncCallsQueue async_calls",
            "._snapshot": "snapshot_shards",
        },
    )

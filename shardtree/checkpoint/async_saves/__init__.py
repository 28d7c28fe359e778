"""Asynchronous saves: snapshots, a thread that writes them, a queue that commits them in order, and the exit."""

from ._exit import refuse_overlap
from ._queue import AsyncCallsQueue, async_calls
from ._snapshot import snapshot_shards

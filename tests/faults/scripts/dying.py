"""Moments of a save at which a rank kills itself with SIGKILL."""

from __future__ import annotations

import os
import signal
from typing import Any

from shardtree.shell.table import METADATA_FILE, safetensors
from shardtree.storage import LocalStorage
from shardtree.strategies import StrategyAction, default_strategies


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DyingBefore(LocalStorage):
    """A folder whose user dies with all written but the file that makes it a checkpoint."""

    def replace(self, name: str, data: bytes, *, durable: bool) -> None:
        if name == METADATA_FILE:
            die()
        super().replace(name, data, durable=durable)


class DyingAfter(LocalStorage):
    """A folder whose user dies when it has just become a checkpoint."""

    def replace(self, name: str, data: bytes, *, durable: bool) -> None:
        super().replace(name, data, durable=durable)
        if name == METADATA_FILE:
            die()


def dead_once_written(pending: Any, shards: Any) -> Any:
    """Save as the native format does, and die once this rank's files are written."""
    request = safetensors.save_sharded(pending, shards)
    written = request.async_fn

    def write_and_die() -> None:
        written()
        die()

    object.__setattr__(request, "async_fn", write_and_die)
    return request


def options(moment: str, folder: str) -> tuple[Any, dict[str, Any]]:
    """Return where to save to and with which options to die: while writing, before or around the commit, or never."""
    if moment == "writing":
        return folder, {"progress": lambda size: die()}
    if moment == "written":
        row = (StrategyAction.SAVE_SHARDED, "safetensors", 1)
        return folder, {"strategies": {**default_strategies, row: dead_once_written}}
    storages = {"committing": DyingBefore, "committed": DyingAfter}
    return storages.get(moment, LocalStorage)(folder), {}

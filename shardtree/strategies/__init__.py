"""Strategies: the dispatch table, the options and arguments of its functions, and helpers for writing a format.

This package isn't stable yet: its names may still change, except those that `shardtree` itself also exports.
"""

import typing

from ..core.deferred import face
from . import base

__all__ = [
    "AsyncRequest",
    "Checked",
    "Checkpoint",
    "Damage",
    "Finding",
    "FormatTraits",
    "Index",
    "LoadOptions",
    "Outcome",
    "PendingSave",
    "RankFiles",
    "ReadCache",
    "Region",
    "Replaced",
    "SaveOptions",
    "StoredItem",
    "Strategies",
    "Strategy",
    "StrategyAction",
    "Unchecked",
    "VerifyReport",
    "build_index",
    "default_strategies",
    "get_default_strategy",
    "item_buffers",
    "rank_file",
    "rank_files",
    "read_index",
    "register_default_strategy",
    "rows_from_index",
    "rows_of_saves",
    "save_with_index",
    "write_file",
]

if typing.TYPE_CHECKING:
    from ..shell.table import (
        AsyncRequest,
        Checked,
        Checkpoint,
        Damage,
        Finding,
        FormatTraits,
        Index,
        LoadOptions,
        Outcome,
        PendingSave,
        RankFiles,
        ReadCache,
        Region,
        Replaced,
        SaveOptions,
        StoredItem,
        Strategies,
        Strategy,
        StrategyAction,
        Unchecked,
        VerifyReport,
        build_index,
        default_strategies,
        get_default_strategy,
        item_buffers,
        rank_file,
        rank_files,
        read_index,
        register_default_strategy,
        rows_from_index,
        rows_of_saves,
        save_with_index,
        write_file,
    )
else:
    __getattr__, __dir__ = face(
        __name__,
        __all__,
        "..shell.table",
    )

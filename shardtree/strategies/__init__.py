"""Strategies: the dispatch table, the signatures of its rows, and one package a format.

This room isn't settled: its names may still change, those of the root alone stay.
"""

from ._actions import PROTOCOLS, Commit, Copies, Describe, Recognize, Resolution, Strategies, Strategy, StrategyAction
from ._checks import IN_COMMON, check_fit, check_taken, misfit, old_unique_key
from ._findings import (
    Checked,
    Damage,
    Finding,
    Region,
    Unchecked,
    VerifyReport,
    by_reason,
    is_damaged,
    refused_findings,
    stored_parts,
)
from ._manifest import MANIFEST_FILE, manifest_findings, read_manifest
from ._metadata import (
    check_unchanged,
    check_unreplaced,
    decode_metadata,
    fetch_checked,
    is_deciding,
    is_of_others,
    metadata_bytes,
    read_metadata,
    refuse_replaced,
    replace_metadata,
    stamp,
    unless_replaced,
    unreplaced,
)
from ._own_hash import encode_metadata
from ._save_folders import (
    OWNER_FILE,
    abandoning,
    alone_in,
    check_alone,
    disown,
    is_committed,
    is_orphaned,
    is_save_file,
    is_save_folder,
    is_surely_orphaned,
    make_save_folder,
    new_save_id,
    owned,
    remove_interrupted,
    remove_save,
    remove_unless_committed,
    save_is_alive,
)
from ._traits import METADATA_FILE, FormatTraits, Stamp
from ._values import (
    AsyncRequest,
    Checkpoint,
    Exchange,
    Fields,
    LoadOptions,
    Outcome,
    PendingSave,
    ReadCache,
    Replaced,
    SaveOptions,
    call_in_turn,
)
from .base import (
    StrategyTable,
    deciding_files,
    default_strategies,
    find_strategy,
    formats_with,
    get_default_strategy,
    register_default_strategy,
    table_of,
    traits_of,
)
from .index import (
    Index,
    RankFiles,
    StoredItem,
    build_index,
    item_buffers,
    rank_file,
    rank_files,
    read_index,
    rows_from_index,
    rows_of_saves,
    save_with_index,
    stored_fingerprints,
    write_file,
)
from .index._metadata import PairsMapping

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

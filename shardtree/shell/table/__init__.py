"""The dispatch table of formats, the signatures of its functions, an index that formats can use, and our own format."""

import typing

from ._actions import (
    PROTOCOLS,
    Copies,
    Describe,
    Recognize,
    Resolution,
    SaveCommon,
    SaveSharded,
    Strategies,
    Strategy,
    StrategyAction,
)
from ._checks import (
    check_fit,
    check_objects_known,
    check_objects_written,
    check_seen,
    checked_data,
    misfit,
    old_unique_key,
)
from ._metadata import (
    check_lengths,
    check_unchanged,
    check_unreplaced,
    checked_entry,
    checked_name,
    decode_metadata,
    fetch_checked,
    fields_of_backend,
    is_deciding,
    is_of_others,
    metadata_bytes,
    read_checked,
    read_metadata,
    refuse_replaced,
    replace_metadata,
    stamp,
    unless_replaced,
    unreplaced,
    write_checked,
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
    noted,
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
)
from .base import (
    StrategyTable,
    deciding_files,
    default_strategies,
    find_strategy,
    formats_with,
    get_default_strategy,
    is_whole,
    manifests,
    packages,
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
    save_file,
    save_in_folder,
    save_with_index,
)

if typing.TYPE_CHECKING:
    from ._findings import (
        Checked,
        Damage,
        Finding,
        Region,
        Unchecked,
        VerifyReport,
        by_reason,
        is_damaged,
    )
    from .index import (
        read_index,
        rows_from_index,
        rows_in_folder,
        rows_of_objects,
        rows_of_saves,
        stored_fingerprints,
        write_file,
    )
    from .index._metadata import PairsMapping
else:
    from ...core.deferred import later

    __getattr__ = later(
        __name__,
        {
            "._findings": "Checked Damage Finding Region Unchecked VerifyReport by_reason is_damaged",
            ".index": (
                "read_index rows_from_index rows_in_folder rows_of_objects rows_of_saves stored_fingerprints write_file"
            ),
            ".index._metadata": "PairsMapping",
        },
    )

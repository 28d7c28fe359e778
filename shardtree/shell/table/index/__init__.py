"""The index: what is in a checkpoint and where, in columns. Formats fill it; loads plan on it."""

import typing

from ._columns import (
    COLUMNS,
    Index,
    chunks_of,
    file_at,
    find_texts,
    int64,
    item_sizes,
    kind_at,
    kinds_at,
    stored_columns,
    text_at,
    text_columns,
    texts,
    whole_shard,
)
from ._file import (
    ObjectRow,
    build_index,
    decode_index,
    encode_index,
    index_problem,
    read_index,
    sound_index,
    unsound_index,
)
from ._save import (
    RankFiles,
    StoredItem,
    collect_index,
    encoded_object,
    item_buffers,
    naming_data_of,
    rank_file,
    rank_files,
    save_with_index,
    write_file,
)

if typing.TYPE_CHECKING:
    from ._damage import bounding_box, file_contents, files_findings, regions_between, whole_file_findings
    from ._load import explain_from_index, load_from_index, plan_shards, planned_cost, read_planned
    from ._metadata import (
        DeferredMetadata,
        IndexMetadata,
        reasoned,
        stored_fingerprints,
        stored_keys,
        stored_kinds,
        untaken_of,
    )
    from ._rows import (
        list_files,
        load_common,
        objects_from_index,
        remove_sharded,
        rows_from_index,
        rows_of_saves,
        unused_files,
        verify_index,
        without_prefix,
    )
else:
    from ....core.deferred import later

    __getattr__ = later(
        __name__,
        {
            "DeferredMetadata": "._metadata",
            "IndexMetadata": "._metadata",
            "bounding_box": "._damage",
            "explain_from_index": "._load",
            "file_contents": "._damage",
            "files_findings": "._damage",
            "list_files": "._rows",
            "load_common": "._rows",
            "load_from_index": "._load",
            "objects_from_index": "._rows",
            "plan_shards": "._load",
            "planned_cost": "._load",
            "read_planned": "._load",
            "reasoned": "._metadata",
            "regions_between": "._damage",
            "remove_sharded": "._rows",
            "rows_from_index": "._rows",
            "rows_of_saves": "._rows",
            "stored_fingerprints": "._metadata",
            "stored_keys": "._metadata",
            "stored_kinds": "._metadata",
            "untaken_of": "._metadata",
            "unused_files": "._rows",
            "verify_index": "._rows",
            "whole_file_findings": "._damage",
            "without_prefix": "._rows",
        },
    )

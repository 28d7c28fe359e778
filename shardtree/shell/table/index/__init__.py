"""The index of a checkpoint: all tensors, objects and files, and the location of each value, in numpy columns.

Formats build an index from their metadata; loads are planned on it.
"""

import typing

from ._columns import (
    COLUMNS,
    Index,
    chunks_of,
    int64,
    item_sizes,
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
    save_file,
    save_in_folder,
    save_with_index,
)

if typing.TYPE_CHECKING:
    from ._load import explain_from_index, load_from_index, plan_shards, planned_cost, read_planned, stored_columns
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
        ReadIndex,
        list_files,
        load_common,
        objects_from_index,
        rows_from_index,
        rows_in_folder,
        rows_of_objects,
        rows_of_saves,
    )
    from ._write_file import write_file
else:
    from ....core.deferred import later

    __getattr__ = later(
        __name__,
        {
            "._load": "explain_from_index load_from_index plan_shards planned_cost read_planned stored_columns",
            "._metadata": (
                "DeferredMetadata IndexMetadata reasoned stored_fingerprints stored_keys stored_kinds untaken_of"
            ),
            "._rows": (
                "ReadIndex list_files load_common objects_from_index rows_from_index rows_in_folder rows_of_objects "
                "rows_of_saves"
            ),
            "._write_file": "write_file",
        },
    )

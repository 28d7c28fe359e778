"""Opening, saving and loading a checkpoint, synchronously or in the background."""

import typing

if typing.TYPE_CHECKING:
    from ._consistency import KnownLayout, LayoutDescription, check_together, describe
    from ._dispatch import (
        Backends,
        Choice,
        alike,
        are_objects_beside,
        backends_of,
        check_options,
        common_backend,
        given_options,
        sharded_backend,
        strategy_of,
    )
    from ._open import (
        CONTENT_METADATA,
        Metadata,
        by_rank_zero,
        is_checkpoint,
        load_common,
        open_at,
        open_together,
        parse_together,
        read_fields,
        recognize,
        remove_sharded_tensors,
        sharded_metadata,
        tensors_of,
    )
    from ._packed import (
        AlikeColumns,
        PackedColumns,
        pack_columns,
        send_tables,
        unpack_columns,
        without_long_table,
    )
    from .async_saves import AsyncCallsQueue, async_calls
    from .loading import StrictHandling, load
    from .saving import save
else:
    from ...core.deferred import later

    __getattr__ = later(
        __name__,
        {
            "._consistency": "KnownLayout LayoutDescription check_together describe",
            "._dispatch": (
                "Backends Choice alike are_objects_beside backends_of check_options common_backend given_options "
                "sharded_backend strategy_of"
            ),
            "._open": (
                "CONTENT_METADATA Metadata by_rank_zero is_checkpoint load_common open_at open_together "
                "parse_together read_fields recognize remove_sharded_tensors sharded_metadata tensors_of"
            ),
            "._packed": "AlikeColumns PackedColumns pack_columns send_tables unpack_columns without_long_table",
            ".async_saves": "AsyncCallsQueue async_calls",
            ".loading": "StrictHandling load",
            ".saving": "save",
        },
    )

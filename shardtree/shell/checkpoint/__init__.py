"""Opening, saving and loading a checkpoint, at once or in the background. Each function reads as the data flows."""

import typing

if typing.TYPE_CHECKING:
    from ._consistency import Description, KnownLayout, check_columns, describe, unions_of
    from ._contents import (
        load_common_state_dict,
        load_content_metadata,
        load_sharded_metadata,
        load_tensors_metadata,
    )
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
        Metadata,
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
            "AlikeColumns": "._packed",
            "AsyncCallsQueue": ".async_saves",
            "Backends": "._dispatch",
            "Choice": "._dispatch",
            "Description": "._consistency",
            "KnownLayout": "._consistency",
            "Metadata": "._open",
            "PackedColumns": "._packed",
            "StrictHandling": ".loading",
            "alike": "._dispatch",
            "are_objects_beside": "._dispatch",
            "async_calls": ".async_saves",
            "backends_of": "._dispatch",
            "check_columns": "._consistency",
            "check_options": "._dispatch",
            "common_backend": "._dispatch",
            "describe": "._consistency",
            "given_options": "._dispatch",
            "is_checkpoint": "._open",
            "load": ".loading",
            "load_common": "._open",
            "load_common_state_dict": "._contents",
            "load_content_metadata": "._contents",
            "load_sharded_metadata": "._contents",
            "load_tensors_metadata": "._contents",
            "open_at": "._open",
            "open_together": "._open",
            "pack_columns": "._packed",
            "parse_together": "._open",
            "read_fields": "._open",
            "recognize": "._open",
            "remove_sharded_tensors": "._open",
            "save": ".saving",
            "send_tables": "._packed",
            "sharded_backend": "._dispatch",
            "sharded_metadata": "._open",
            "strategy_of": "._dispatch",
            "tensors_of": "._open",
            "unions_of": "._consistency",
            "unpack_columns": "._packed",
            "without_long_table": "._packed",
        },
    )

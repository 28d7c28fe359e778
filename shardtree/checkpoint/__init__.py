"""Whole checkpoints: save, load, look inside, read lazily. Each function reads as the data flows."""

import typing

from .._deferred import later

__all__ = [
    "AsyncCallsQueue",
    "CheckpointDifference",
    "CheckpointSeries",
    "ConversionReport",
    "FileMark",
    "KindDifference",
    "OpenCheckpoint",
    "Removal",
    "ReplicaDifference",
    "StepFiles",
    "StrictHandling",
    "ValueDifference",
    "async_calls",
    "check_replicas",
    "compare",
    "convert",
    "explain",
    "explain_ranks",
    "fingerprint",
    "is_checkpoint",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "open_checkpoint",
    "remove_sharded_tensors",
    "save",
    "verify",
]

if typing.TYPE_CHECKING:
    from ._comparison import CheckpointDifference, KindDifference, compare
    from ._contents import (
        load_common_state_dict,
        load_content_metadata,
        load_sharded_metadata,
        load_tensors_metadata,
    )
    from ._differences import ValueDifference
    from ._fingerprint import fingerprint
    from ._no_checkpoint import step_prefix
    from ._open import is_checkpoint, remove_sharded_tensors
    from ._replicas import ReplicaDifference, check_replicas
    from ._verify import verify
    from ._whole_tensors import load_plain_tensors
    from .async_saves import AsyncCallsQueue, async_calls
    from .conversion import ConversionReport, convert
    from .loading import StrictHandling, load
    from .loading._explain import explain, explain_ranks
    from .opened import OpenCheckpoint, open_checkpoint
    from .saving import save
    from .series import CheckpointSeries, FileMark, Removal, StepFiles
else:
    from .._deferred import later

    __getattr__ = later(
        __name__,
        {
            "AsyncCallsQueue": ".async_saves",
            "CheckpointDifference": "._comparison",
            "CheckpointSeries": ".series",
            "ConversionReport": ".conversion",
            "FileMark": ".series",
            "KindDifference": "._comparison",
            "OpenCheckpoint": ".opened",
            "Removal": ".series",
            "ReplicaDifference": "._replicas",
            "StepFiles": ".series",
            "StrictHandling": ".loading",
            "ValueDifference": "._differences",
            "async_calls": ".async_saves",
            "check_replicas": "._replicas",
            "compare": "._comparison",
            "convert": ".conversion",
            "explain": ".loading._explain",
            "explain_ranks": ".loading._explain",
            "fingerprint": "._fingerprint",
            "is_checkpoint": "._open",
            "load": ".loading",
            "load_common_state_dict": "._contents",
            "load_content_metadata": "._contents",
            "load_plain_tensors": "._whole_tensors",
            "load_sharded_metadata": "._contents",
            "load_tensors_metadata": "._contents",
            "open_checkpoint": ".opened",
            "remove_sharded_tensors": "._open",
            "save": ".saving",
            "step_prefix": "._no_checkpoint",
            "verify": "._verify",
        },
    )

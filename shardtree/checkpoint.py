"""Whole checkpoints: save, load, inspect, read lazily."""

from __future__ import annotations

import typing

from .core.deferred import face

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
    from .conversion import ConversionReport, convert
    from .inspection import (
        CheckpointDifference,
        KindDifference,
        OpenCheckpoint,
        ValueDifference,
        check_replicas,
        compare,
        explain,
        explain_ranks,
        fingerprint,
        load_common_state_dict,
        load_content_metadata,
        load_plain_tensors,
        load_sharded_metadata,
        load_tensors_metadata,
        open_checkpoint,
        verify,
    )
    from .inspection._replicas import ReplicaDifference
    from .series import CheckpointSeries, FileMark, Removal, StepFiles
    from .shell.checkpoint import (
        AsyncCallsQueue,
        StrictHandling,
        async_calls,
        is_checkpoint,
        load,
        remove_sharded_tensors,
        save,
    )
else:
    __getattr__, __dir__ = face(
        __name__,
        __all__,
        "..inspection",
        {
            "..conversion": "ConversionReport convert",
            "..inspection._replicas": "ReplicaDifference",
            "..series": "CheckpointSeries FileMark Removal StepFiles",
            "..shell.checkpoint": (
                "AsyncCallsQueue StrictHandling async_calls is_checkpoint load remove_sharded_tensors save"
            ),
        },
    )

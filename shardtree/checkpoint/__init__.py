"""Whole checkpoints: save, load, look inside, read lazily. Each function reads as the data flows."""

from ._fingerprint import fingerprint
from ._lazy_tree import OpenCheckpoint, open_checkpoint
from ._open import (
    is_checkpoint,
    load_common_state_dict,
    load_content_metadata,
    load_sharded_metadata,
    load_tensors_metadata,
    remove_sharded_tensors,
)
from ._verify import verify
from .async_saves import AsyncCallsQueue, async_calls
from .comparison import CheckpointDifference, KindDifference, ValueDifference, compare
from .conversion import ConversionReport, convert
from .loading import StrictHandling, explain, explain_ranks, load, load_plain_tensors
from .saving import save
from .series import CheckpointSeries, FileMark, Removal, StepFiles

__all__ = [
    "AsyncCallsQueue",
    "CheckpointDifference",
    "CheckpointSeries",
    "ConversionReport",
    "FileMark",
    "KindDifference",
    "OpenCheckpoint",
    "Removal",
    "StepFiles",
    "StrictHandling",
    "ValueDifference",
    "async_calls",
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

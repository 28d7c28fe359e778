"""Whole checkpoints: save, load, look inside, read lazily. Each function reads as the data flows."""

from ._fingerprint import fingerprint as fingerprint
from ._lazy_tree import OpenCheckpoint as OpenCheckpoint
from ._lazy_tree import open_checkpoint as open_checkpoint
from ._open import is_checkpoint as is_checkpoint
from ._open import load_common_state_dict as load_common_state_dict
from ._open import load_content_metadata as load_content_metadata
from ._open import load_sharded_metadata as load_sharded_metadata
from ._open import load_tensors_metadata as load_tensors_metadata
from ._open import remove_sharded_tensors as remove_sharded_tensors
from ._verify import verify as verify
from .async_saves import AsyncCallsQueue as AsyncCallsQueue
from .async_saves import async_calls as async_calls
from .comparison import CheckpointDifference as CheckpointDifference
from .comparison import KindDifference as KindDifference
from .comparison import ValueDifference as ValueDifference
from .comparison import compare as compare
from .conversion import ConversionReport as ConversionReport
from .conversion import convert as convert
from .loading import StrictHandling as StrictHandling
from .loading import explain as explain
from .loading import explain_ranks as explain_ranks
from .loading import load as load
from .loading import load_plain_tensors as load_plain_tensors
from .saving import save as save
from .series import CheckpointSeries as CheckpointSeries
from .series import FileMark as FileMark
from .series import Removal as Removal
from .series import StepFiles as StepFiles

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

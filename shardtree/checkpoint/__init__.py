"""Whole checkpoints: save, load, look inside, read lazily. Each function reads as the data flows."""

from ._compare import CheckpointDifference as CheckpointDifference
from ._compare import KindDifference as KindDifference
from ._compare import compare_checkpoints as compare_checkpoints
from ._compare_values import ValueDifference as ValueDifference
from ._lazy_tree import OpenCheckpoint as OpenCheckpoint
from ._lazy_tree import open_checkpoint as open_checkpoint
from ._load import load as load
from ._load import load_plain_tensors as load_plain_tensors
from ._open import is_checkpoint as is_checkpoint
from ._open import load_common_state_dict as load_common_state_dict
from ._open import load_content_metadata as load_content_metadata
from ._open import load_sharded_metadata as load_sharded_metadata
from ._open import load_tensors_metadata as load_tensors_metadata
from ._open import remove_sharded_tensors as remove_sharded_tensors
from ._save import save as save
from ._strict import StrictHandling as StrictHandling
from ._verify import verify as verify
from .conversion import ConversionReport as ConversionReport
from .conversion import convert as convert

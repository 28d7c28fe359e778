"""A `StorageReader` and a `StorageWriter` by which torch.distributed.checkpoint (DCP) loads and saves our checkpoints.

Unlike most modules of `shardtree.interop`, this one imports its library at once, since its classes derive from the
library's. It is itself imported on first access.
"""

from ._reader import CheckpointReader
from ._writer import CheckpointWriter

__all__ = ["CheckpointReader", "CheckpointWriter"]

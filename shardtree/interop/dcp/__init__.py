"""A `StorageReader` and a `StorageWriter` by which torch.distributed.checkpoint (DCP) loads and saves our checkpoints.

Unlike most modules of `shardtree.interop`, this one imports its library at once, since its classes derive from the
library's. It is imported when it is first asked for.
"""

from ._reader import CheckpointReader
from ._writer import CheckpointWriter

__all__ = ["CheckpointReader", "CheckpointWriter"]

"""torch.distributed.checkpoint's calls over our checkpoints: a `StorageReader` for its load, a writer for its save.

Unlike other modules of this room, this one imports its library at once, since its classes are derived from the
library's. The room imports it when it is first asked for.
"""

from ._reader import CheckpointReader
from ._writer import CheckpointWriter

__all__ = ["CheckpointReader", "CheckpointWriter"]

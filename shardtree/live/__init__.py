"""Live resharding: tensors move from ranks that hold them to ranks that want them, without files."""

from ._pack import copy_doubled as copy_doubled
from ._pack import copy_own as copy_own
from ._pack import incoming_bytes as incoming_bytes
from ._pack import outgoing_bytes as outgoing_bytes
from ._pack import pack_into as pack_into
from ._pack import packed as packed
from ._pack import unpack as unpack
from ._redistribute import Transport as Transport
from ._redistribute import redistribute as redistribute

__all__ = [
    "Transport",
    "redistribute",
]

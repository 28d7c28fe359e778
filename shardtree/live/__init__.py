"""Live resharding: tensors move from ranks that hold them to ranks that want them, without files."""

from ._memory import make_buffers
from ._pack import copy_doubled, copy_own, incoming_bytes, outgoing_bytes, pack_into, packed, unpack
from ._redistribute import BYTES_IN_FLIGHT, Route, Transport, move, redistribute

__all__ = [
    "Transport",
    "redistribute",
]

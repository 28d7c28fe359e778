"""Live resharding: tensors move from ranks that hold them to ranks that want them, without files."""

from ._pack import copy_doubled, copy_own, incoming_bytes, outgoing_bytes, pack_into, packed, unpack
from ._redistribute import Transport, redistribute

__all__ = [
    "Transport",
    "redistribute",
]

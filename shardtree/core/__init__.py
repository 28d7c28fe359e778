"""The core: leaves, geometry, tree maps, layouts, plans and encodings, which describe and have no effect."""

from . import limits as limits

# Whoever unpickles a shard, or imports a leaf by its own module, gets leaves that optree knows as nodes.
from . import trees as trees

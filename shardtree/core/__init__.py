"""The core: leaves, geometry, tree maps, layouts, plans and encodings, which describe and have no effect."""

from . import limits as limits

# Importing the trees registers leaves with optree, also for programs that only unpickle a shard or import its module.
from . import trees as trees

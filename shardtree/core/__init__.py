"""The core: leaves, geometry, tree maps, layouts, plans and encodings.

Its functions only describe and compute: they open no files and have no other side effects.
"""

from . import limits as limits

# Importing the trees registers leaves with optree, also for programs that only unpickle a shard or import its module.
from . import trees as trees

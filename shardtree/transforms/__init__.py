"""Pure functions from one naming of tensors to another: layers stacked, tensors cut and joined, keys renamed.

They take and give flat trees, as an open checkpoint is one, and only record what they do to lazy tensors.
"""

from ._rename import partial_rename as partial_rename
from ._split import merge_tensors as merge_tensors
from ._split import split_tensor as split_tensor
from ._stack import stack_layers as stack_layers
from ._stack import unstack_layers as unstack_layers
from .lenses import PADDING as PADDING
from .lenses import AxisRuns as AxisRuns
from .lenses import Built as Built
from .lenses import Lens as Lens
from .lenses import as_factory as as_factory
from .lenses import compose_factories as compose_factories
from .lenses import factories_by_pattern as factories_by_pattern
from .lenses import gate_and_up as gate_and_up
from .lenses import grouped_runs as grouped_runs
from .lenses import joined_parts as joined_parts
from .lenses import mapped_axis as mapped_axis
from .lenses import transposed as transposed

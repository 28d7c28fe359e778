"""Factories as lenses: what a model holds in one form and a checkpoint in another, and the way between, on any box."""

from ._axis_runs import PADDING as PADDING
from ._axis_runs import AxisRuns as AxisRuns
from ._axis_runs import grouped_runs as grouped_runs
from ._axis_runs import joined_parts as joined_parts
from ._factory import as_factory as as_factory
from ._factory import factories_by_pattern as factories_by_pattern
from ._gated import gate_and_up as gate_and_up
from ._lens import Built as Built
from ._lens import Lens as Lens
from ._lens import compose_factories as compose_factories
from ._mapped import mapped_axis as mapped_axis
from ._transposed import transposed as transposed

"""Factories as lenses: what a model holds in one form and a checkpoint in another, and the way between, on any box."""

from ._attention import FusedForm as FusedForm
from ._attention import attention_qkv as attention_qkv
from ._axis_runs import PADDING as PADDING
from ._axis_runs import AxisRuns as AxisRuns
from ._axis_runs import grouped_runs as grouped_runs
from ._axis_runs import joined_parts as joined_parts
from ._experts import expert_keys as expert_keys
from ._experts import expert_stack as expert_stack
from ._factory import as_factory as as_factory
from ._factory import factories_by_pattern as factories_by_pattern
from ._gated import gate_and_up as gate_and_up
from ._lens import Built as Built
from ._lens import Lens as Lens
from ._lens import compose_factories as compose_factories
from ._mapped import mapped_axis as mapped_axis
from ._padded import padded_axis as padded_axis
from ._rearranged import rearranged as rearranged
from ._renamed import lenses_by_pattern as lenses_by_pattern
from ._renamed import renamed as renamed
from ._renamed import tied as tied
from ._rotary import rotary_halves as rotary_halves
from ._rotary import rotary_pairs as rotary_pairs
from ._stacked import stacked_layers as stacked_layers
from ._stacked import unstacked_layers as unstacked_layers
from ._transposed import transposed as transposed

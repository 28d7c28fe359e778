"""Lenses for factories: pure functions from a model's form of a tensor to a checkpoint's, with the way back."""

from ._attention import FusedForm as FusedForm
from ._attention import attention_qkv as attention_qkv
from ._attention import rotary_halves as rotary_halves
from ._attention import rotary_pairs as rotary_pairs
from ._axis_runs import PADDING as PADDING
from ._axis_runs import AxisRuns as AxisRuns
from ._axis_runs import grouped_runs as grouped_runs
from ._axis_runs import joined_parts as joined_parts
from ._factory import as_factory as as_factory
from ._factory import boxes_of as boxes_of
from ._factory import factories_by_pattern as factories_by_pattern
from ._factory import flat_of as flat_of
from ._lens import Lens as Lens
from ._lens import StoredForm as StoredForm
from ._lens import compose as compose
from ._mapped import gate_and_up as gate_and_up
from ._mapped import mapped_axis as mapped_axis
from ._mapped import padded_axis as padded_axis
from ._rearranged import rearranged as rearranged
from ._rearranged import transposed as transposed
from ._renamed import by_pattern as by_pattern
from ._renamed import renamed as renamed
from ._renamed import tied as tied
from ._stacked import expert_keys as expert_keys
from ._stacked import expert_stack as expert_stack
from ._stacked import stacked_layers as stacked_layers
from ._stacked import unstacked_layers as unstacked_layers

__all__ = [
    "PADDING",
    "AxisRuns",
    "FusedForm",
    "Lens",
    "StoredForm",
    "as_factory",
    "attention_qkv",
    "boxes_of",
    "by_pattern",
    "expert_keys",
    "expert_stack",
    "factories_by_pattern",
    "flat_of",
    "gate_and_up",
    "grouped_runs",
    "joined_parts",
    "mapped_axis",
    "padded_axis",
    "rearranged",
    "renamed",
    "rotary_halves",
    "rotary_pairs",
    "stacked_layers",
    "tied",
    "transposed",
    "unstacked_layers",
]

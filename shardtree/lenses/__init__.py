"""Lenses for factories: pure functions from a tensor's form in a model to its form in a checkpoint, and back."""

from ..core.lazy import computed
from ._attention import FusedForm, attention_qkv, rotary_halves, rotary_pairs
from ._axis_runs import PADDING, AxisRuns, grouped_runs, joined_parts
from ._factory import as_factory, boxes_of, factories_by_pattern, flat_of
from ._lens import Lens, StoredForm, compose
from ._mapped import gate_and_up, mapped_axis, padded_axis
from ._rearranged import rearranged, transposed
from ._renamed import by_pattern, renamed, tied
from ._stacked import expert_keys, expert_stack, layer_at, stacked_layers, unstacked_layers
from ._traced import from_function, through_trace

__all__ = [
    "AxisRuns",
    "Lens",
    "StoredForm",
    "as_factory",
    "attention_qkv",
    "boxes_of",
    "by_pattern",
    "computed",
    "expert_keys",
    "expert_stack",
    "factories_by_pattern",
    "flat_of",
    "from_function",
    "gate_and_up",
    "grouped_runs",
    "mapped_axis",
    "padded_axis",
    "rearranged",
    "renamed",
    "rotary_halves",
    "rotary_pairs",
    "stacked_layers",
    "through_trace",
    "tied",
    "transposed",
    "unstacked_layers",
]
